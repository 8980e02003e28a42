# Copyright (c) the d2_memfit developers.
import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead
from detectron2.modeling.proposal_generator import rpn
from detectron2.structures import Boxes, pairwise_iou
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.errors import ConfigError
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import ChunkedMatcher, PairwiseQuality, apply_techniques, get_technique


def boxes(num, seed, size=100):
    """Of whole pixels, so that many overlaps are the same."""
    rng = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, size, (num, 2), generator=rng)
    extent = torch.randint(0, 20, (num, 2), generator=rng)  # some are empty
    return Boxes(torch.cat([corner, corner + extent], dim=1).float())


def quality(instances, anchors, chunk_size):
    def compute(rows, columns):
        return pairwise_iou(instances[rows], anchors[columns])

    return PairwiseQuality(compute, (len(instances), len(anchors)), chunk_size)


def apply(model, chunk_size=7):
    cfg = tiny_cfg()
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = chunk_size
    return get_technique("ChunkedMatching").apply(model, cfg)


@pytest.mark.parametrize("low_quality", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("num_instances", "num_anchors"), [(5, 200), (40, 64), (1, 1), (0, 9), (3, 0)]
)
def test_labels_are_those_of_detectron2(num_instances, num_anchors, chunk_size, low_quality):
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=low_quality)
    for seed in range(5):
        instances, anchors = boxes(num_instances, seed), boxes(num_anchors, seed + 100)
        expected = matcher(pairwise_iou(instances, anchors))
        actual = ChunkedMatcher(matcher)(quality(instances, anchors, chunk_size))
        for a, e in zip(actual, expected):
            assert a.dtype == e.dtype
            assert torch.equal(a, e)


def test_an_instance_that_touches_no_anchor_labels_all_of_them_as_in_detectron2():
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    instances = Boxes(torch.tensor([[500.0, 500, 510, 510]]))
    _, labels = ChunkedMatcher(matcher)(quality(instances, boxes(50, 0), 7))
    assert (labels == 1).all()


def test_a_matrix_is_matched_too():
    matcher = Matcher([0.5], [0, 1])
    matrix = torch.rand(4, 30)
    for a, e in zip(ChunkedMatcher(matcher)(matrix), matcher(matrix)):
        assert torch.equal(a, e)


@pytest.mark.slow
def test_memory_grows_with_anchors_and_not_with_pairs():
    matcher = ChunkedMatcher(Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True))
    instances, anchors = boxes(300, 0), boxes(20_000, 1)
    with TensorMeter() as plain:
        matcher(pairwise_iou(instances, anchors))
    with TensorMeter() as chunked:
        matcher(quality(instances, anchors, 500))
    assert chunked.peak_bytes < plain.peak_bytes / 20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["proposal_network", "faster_rcnn", "retinanet", "cascade_rcnn"])
def test_no_matrix_of_all_pairs_is_made_in_a_model(family):
    cfg = tiny_cfg("faster_rcnn" if family == "cascade_rcnn" else family)
    if family == "cascade_rcnn":
        cfg.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
        cfg.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True
    batch = images(1, num_instances=11)
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = 7
    # The labels of what is checkpointed are found again in the backward.
    cfg.MEMFIT.CHECKPOINT.MODULES = ["*" if family == "retinanet" else "proposal_generator"]
    if family.endswith("rcnn"):
        cfg.MEMFIT.CHECKPOINT.MODULES.append("roi_heads")
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


def test_a_matcher_of_a_project_s_own_class_gets_the_whole_matrix_and_is_named(log):
    plain, model = (tiny_model(tiny_cfg("faster_rcnn")) for _ in range(2))
    losses = []
    for changed in (plain, model):
        changed.proposal_generator.anchor_matcher.__class__ = OwnMatcher
        apply(changed) if changed is model else None
        torch.manual_seed(0)
        with EventStorage():
            losses.append(changed(images(2)))
    assert losses[0] == losses[1]
    assert "CHUNK_SIZE: the RPN matches all at once, because of its own OwnMatcher" in log.text
    model = tiny_model(tiny_cfg("proposal_network"))
    model.proposal_generator.anchor_matcher.__class__ = OwnMatcher
    with pytest.raises(ConfigError, match="the model has no matching of Detectron2"):
        apply(model)


def test_detectron2_is_as_before_outside_of_the_model():
    original = rpn.pairwise_iou
    model = apply(tiny_model(tiny_cfg("proposal_network")))
    with EventStorage(), pytest.raises(AttributeError):
        model([{"image": None}])
    assert rpn.pairwise_iou is original
    assert isinstance(rpn.pairwise_iou(boxes(2, 0), boxes(3, 1)), torch.Tensor)


def test_fcos_labels_are_those_of_detectron2():
    plain = fcos_model()
    anchors = plain.anchor_generator([torch.zeros(1, 1, 64 // s, 64 // s) for s in (8, 16, 32)])
    instances = [image["instances"] for image in images(3, num_instances=6)]
    expected = plain.label_anchors(anchors, instances)
    for chunk_size in (1, 7, 50, 1000):
        actual = apply(fcos_model(), chunk_size).label_anchors(anchors, instances)
        for a, e in zip(actual, expected):
            for x, y in zip(a, e):  # boxes are a tensor in main
                assert torch.equal(getattr(x, "tensor", x), getattr(y, "tensor", y))


def fcos_model():
    class Backbone(torch.nn.Module):
        def output_shape(self):
            return {f"p{s}": ShapeSpec(channels=8, stride=s) for s in (8, 16, 32)}

    shapes = list(Backbone().output_shape().values())
    head = FCOSHead(input_shape=shapes, num_classes=3, conv_dims=[8], norm="", prior_prob=0.01)
    return FCOS(
        backbone=Backbone(),
        head=head,
        num_classes=3,
        head_in_features=["p8", "p16", "p32"],
        pixel_mean=[0.0] * 3,
        pixel_std=[1.0] * 3,
    )


@pytest.mark.parametrize("chunk_size", [0, -1, 2.5, "many"])
def test_a_chunk_size_that_cannot_work_is_an_error(chunk_size):
    cfg = tiny_cfg()
    cfg.MEMFIT.MATCHING.CHUNK_SIZE = chunk_size
    with pytest.raises(ConfigError, match=f"MATCHING.CHUNK_SIZE .*got {chunk_size!r}"):
        get_technique("ChunkedMatching").is_on(cfg)
