# Copyright (c) the d2_memfit developers.
import copy

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.proposal_generator import rpn
from detectron2.structures import Boxes, pairwise_iou
from detectron2.utils.events import EventStorage
from tiny import images, relative_difference, tiny_cfg, tiny_model

from d2_memfit.common.errors import ConfigError
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.crowds import pairwise_iou_in_chunks
from d2_memfit.techniques.registry import apply_techniques

DENOISING = "MEMFIT.CRITERION.DENOISING_QUERIES"


def boxes(num, seed, size=100):
    """Of whole pixels, so that many overlaps are the same."""
    rng = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, size, (num, 2), generator=rng)
    extent = torch.randint(0, 20, (num, 2), generator=rng)  # some are empty
    return Boxes(torch.cat([corner, corner + extent], dim=1).float())


@pytest.mark.parametrize("low_quality", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("num_instances", "num_anchors"), [(5, 200), (40, 64), (1, 1), (0, 9), (3, 0)]
)
def test_labels_are_those_of_detectron2(num_instances, num_anchors, chunk_size, low_quality):
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=low_quality)
    for seed in range(5):
        instances, anchors = boxes(num_instances, seed), boxes(num_anchors, seed + 100)
        far = Boxes(instances.tensor + 500)  # touches no anchor
        for found in (instances, far, Boxes.cat([instances, far])):
            expected = matcher(pairwise_iou(found, anchors))
            actual = matcher(pairwise_iou_in_chunks(chunk_size, pairwise_iou)(found, anchors))
            for a, e in zip(actual, expected):
                assert a.dtype == e.dtype
                assert torch.equal(a, e)


def test_memory_grows_with_anchors_and_not_with_pairs():
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    instances, anchors = boxes(300, 0), boxes(20_000, 1)
    peaks = []
    for iou in (pairwise_iou, pairwise_iou_in_chunks(500, pairwise_iou)):
        with TensorMeter() as meter:
            matcher(iou(instances, anchors))
        peaks.append(meter.peak_bytes)
    assert peaks[1] < peaks[0] / 20


@pytest.mark.parametrize("family", ["faster_rcnn", "retinanet"])
def test_no_matrix_of_all_pairs_is_made_in_a_model(family):
    cfg = tiny_cfg(family)
    batch = images(1, num_instances=11)
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = 7
    # The labels of what is checkpointed are found again in the backward.
    heads = ["proposal_generator", "roi_heads"]
    cfg.MEMFIT.CHECKPOINT.MODULES = ["backbone"] if family == "retinanet" else heads
    largest = []

    class Shapes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[0] == 11:
                largest.append(result.shape[1])
            return result

    model = apply_techniques("model", tiny_model(cfg), cfg)
    with EventStorage(), Shapes():
        sum(model(batch).values()).backward()
    assert max(largest) <= 7


class OwnMatcher(Matcher):
    def __call__(self, quality):
        return super().__call__(quality + quality.std())


def in_chunks(model, chunk_size=7):
    cfg = tiny_cfg()
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = chunk_size
    return apply_techniques("model", model, cfg)


def test_a_matcher_of_a_projects_own_class_gets_the_matrix():
    plain = tiny_model(tiny_cfg("faster_rcnn"))
    plain.proposal_generator.anchor_matcher.__class__ = OwnMatcher
    losses = []
    for model in (plain, in_chunks(copy.deepcopy(plain))):
        torch.manual_seed(0)
        with EventStorage():
            losses.append(model(images(2)))
    assert losses[0] == losses[1]
    model = tiny_model(tiny_cfg("proposal_network"))
    model.proposal_generator.anchor_matcher.__class__ = OwnMatcher
    with pytest.raises(ConfigError, match=r"MATCHING.CHUNK_SIZE: the model has no Matcher"):
        in_chunks(model)


def test_detectron2_is_as_before_outside_of_the_model():
    original = rpn.pairwise_iou
    model = in_chunks(tiny_model(tiny_cfg("proposal_network")))
    with EventStorage(), pytest.raises(AttributeError):
        model([{"image": None}])
    assert rpn.pairwise_iou is original


def detector(kind, limit=None):
    """A tiny detector with the same weights each time, and a num_denoising of 10."""
    pytest.importorskip("transformers")
    from tiny_transformers import tiny_transformers_cfg

    cfg = tiny_transformers_cfg(kind)
    cfg.MEMFIT.CRITERION.DENOISING_QUERIES = limit
    torch.manual_seed(0)
    model = apply_techniques("model", build_model(cfg), cfg)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    return model


def step(model, counts):
    """Losses and gradients of images with so many objects."""
    torch.manual_seed(1)
    losses = model([images(1, first=i, num_instances=n)[0] for i, n in enumerate(counts)])
    sum(losses.values()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {k: v.detach() for k, v in losses.items()}, gradients


@pytest.mark.parametrize("counts", [(6, 3), (12,), (12, 0), (0, 0)])
def test_up_to_the_limit_denoising_is_the_models_own(counts):
    for expected, actual in zip(*(step(detector("rt_detr_v2", n), counts) for n in (None, 12))):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[k], expected[k]) for k in expected)


def test_a_forward_with_a_crowded_image_has_no_denoising_queries(log):
    plain, limited = detector("rt_detr_v2"), detector("rt_detr_v2", 12)
    for counts in ((30, 4), (4, 30)):
        expected, actual = step(plain, counts)[0], step(limited, counts)[0]
        matched = {name: loss for name, loss in expected.items() if "_dn_" not in name}
        assert actual.keys() == matched.keys() < expected.keys()
        assert relative_difference(actual, matched) < 1e-5
    assert log.text.count(f"{DENOISING} 12: an image has 30 objects") == 1


def test_a_thousand_objects_need_half_of_the_memory():
    peaks = []
    for limit in (None, 100):
        model = detector("rt_detr_v2", limit)
        with TensorMeter() as meter:
            step(model, (1000,))
        peaks.append(meter.peak_bytes)
    assert peaks[1] < 0.5 * peaks[0]


def test_a_model_without_denoising_queries_is_an_error():
    cfg = tiny_cfg()
    cfg.merge_from_list([DENOISING, 10])
    with pytest.raises(ConfigError, match=f"{DENOISING}: no class of the model calls"):
        apply_techniques("model", tiny_model(cfg), cfg)
