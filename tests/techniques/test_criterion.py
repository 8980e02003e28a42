# Copyright (c) the d2_memfit developers.
import copy
import pickle

import pytest
import torch
from benchmarks.detr_like import (
    NUM_CLASSES,
    HungarianMatcher,
    SetCriterion,
    add_detr_config,
    mask_losses,
)
from detectron2.utils.events import EventStorage
from scipy.optimize import linear_sum_assignment
from tiny import images, relative_difference, tiny_cfg, tiny_model

from d2_memfit.errors import ConfigError
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import get_technique

pytestmark = pytest.mark.slow

KINDS = {"boxes": 0, "masks": 0, "points": 50}  # and points at which masks are compared


def apply(model, chunk_size=7):
    cfg = tiny_cfg()
    cfg.MEMFIT.CRITERION.CHUNK_SIZE = chunk_size
    assert get_technique("ChunkedCriterion").is_on(cfg)
    return get_technique("ChunkedCriterion").apply(model, cfg)


def criterion(kind, chunk_size=None, matcher=None):
    losses = list(dict.fromkeys(["labels", "boxes", kind]))
    made = SetCriterion(matcher or HungarianMatcher(KINDS[kind]), losses, KINDS[kind])
    return apply(made, chunk_size) if chunk_size else made


def random_outputs(num_images, num_queries, size=16, num_layers=2):
    """Predictions of each layer, as leaves that require gradients."""
    rng = torch.Generator().manual_seed(0)

    def layer():
        logits = torch.randn(num_images, num_queries, NUM_CLASSES + 1, generator=rng)
        boxes = torch.rand(num_images, num_queries, 4, generator=rng) * 0.5 + 0.1
        masks = torch.randn(num_images, num_queries, size, size, generator=rng)
        named = {"pred_logits": logits, "pred_boxes": boxes, "pred_masks": masks}
        return {k: v.requires_grad_() for k, v in named.items()}

    return {**layer(), "aux_outputs": [layer() for _ in range(num_layers - 1)]}


def random_targets(counts, size=32):
    """Targets with the given number of objects in each image."""
    rng = torch.Generator().manual_seed(0)
    return [
        {
            "labels": torch.randint(0, NUM_CLASSES, (num,), generator=rng),
            "boxes": torch.rand(num, 4, generator=rng) * 0.5 + 0.1,
            "masks": torch.rand(num, size, size, generator=rng) > 0.5,
            "size": torch.tensor([size, size]),
        }
        for num in counts
    ]


def step(criterion, counts, num_queries=40):
    """Losses, gradients, and a random number that is drawn afterwards."""
    outputs = random_outputs(len(counts), num_queries)
    torch.manual_seed(1)
    losses = criterion(outputs, random_targets(counts))
    sum(losses.values()).backward()
    layers = enumerate([outputs, *outputs["aux_outputs"]])
    gradients = {(n, k): v.grad for n, layer in layers for k, v in layer.items() if k[0] == "p"}
    return losses, {k: v for k, v in gradients.items() if v is not None}, torch.rand(1)


@pytest.mark.parametrize("counts", [[20, 33], [50], [0, 9, 0], [0, 0]])
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_all_objects_at_once(kind, chunk_size, counts):
    plain = step(criterion(kind), counts)
    changed = criterion(kind, chunk_size)
    chunked = step(changed, counts)
    assert all(changed.can_chunk.values())
    assert bool(changed.can_chunk) == (sum(counts) > max(chunk_size, 3))
    for expected, actual in zip(plain[:2], chunked[:2]):
        assert actual.keys() == expected.keys()
        assert relative_difference(actual, expected) < (1e-6 if changed.can_chunk else 1e-9)
    assert torch.equal(chunked[2], plain[2])


@pytest.mark.parametrize("counts", [[60, 25], [1, 2, 80]])
def test_costs_and_matches_are_the_same_to_the_last_bit(counts, monkeypatch):
    from benchmarks import detr_like

    costs = []

    def recording(cost):
        costs.append(torch.as_tensor(cost))
        return linear_sum_assignment(cost)

    outputs, targets = random_outputs(len(counts), 50), random_targets(counts)
    monkeypatch.setattr(detr_like, "linear_sum_assignment", recording)
    expected = HungarianMatcher()(outputs, targets)
    plain = list(costs)
    matcher = apply(HungarianMatcher())
    matcher(outputs, targets)  # tried with a few objects, once
    costs.clear()
    found = matcher(outputs, targets)
    assert len(costs) >= len(plain)
    assert all(torch.equal(a, b) for a, b in zip(costs[-len(plain) :], plain))
    assert all(torch.equal(a, b) for e, f in zip(expected, found) for a, b in zip(e, f))


@pytest.mark.parametrize(
    ("kind", "counts"), [("boxes", [2000]), ("boxes", [1000] * 2), ("masks", [2000])]
)
def test_the_peak_with_300_queries_and_2000_objects_is_ten_times_smaller_without_bits(kind, counts):
    outputs = random_outputs(len(counts), 300, size=32, num_layers=1)
    targets = random_targets(counts, size=128 if kind == "masks" else 1)
    peaks = []
    for made in (criterion(kind), criterion(kind, 32)):
        made.losses.remove("labels")  # of all queries, and as small as before
        with TensorMeter() as meter:
            sum(made(outputs, targets).values()).backward()
        peaks.append(meter.peak_bytes)
    bits = sum(t["masks"].numel() for t in targets) // 8 if kind == "masks" else 0
    assert peaks[1] - bits < peaks[0] / 10


class GroupMatcher(HungarianMatcher):
    """Each half of the queries is matched to all objects, as in Group DETR."""

    def forward(self, outputs, targets):
        half = outputs["pred_logits"].shape[1] // 2
        parts = [{k: v[:, s] for k, v in outputs.items()} for s in (slice(half), slice(half, None))]
        groups = [super(GroupMatcher, self).forward(part, targets) for part in parts]
        return [(torch.cat([a[0], b[0] + half]), torch.cat([a[1], b[1]])) for a, b in zip(*groups)]


def test_queries_in_groups_are_matched_the_same():
    expected = step(criterion("boxes", matcher=GroupMatcher()), [20, 33], num_queries=90)
    changed = criterion("boxes", 7, matcher=GroupMatcher())
    found = step(changed, [20, 33], num_queries=90)
    assert changed.can_chunk["GroupMatcher.forward"]
    assert relative_difference(found[1], expected[1]) < 1e-6


@pytest.mark.parametrize(("num_objects", "pairs"), [(4, [8]), (8, [8] * 2), (30, [7, 8] * 4)])
def test_chunks_of_losses_have_the_pairs_of_all_groups_and_boxes_are_computed_once(
    num_objects, pairs
):
    calls = []

    class Counting(SetCriterion):
        def loss_boxes(self, outputs, targets, indices, num_boxes):
            calls.append(sum(len(queries) for queries, _ in indices))
            return super().loss_boxes(outputs, targets, indices, num_boxes)

    changed = apply(Counting(GroupMatcher(), ["labels", "boxes"], 0), 8)
    outputs = random_outputs(1, 120, num_layers=1)
    changed(outputs, random_targets([num_objects]))
    calls.clear()  # chunks were tried with a few objects
    sum(changed(outputs, random_targets([num_objects])).values()).backward()
    assert calls == pairs


class CostsOfMeans(HungarianMatcher):
    def forward(self, outputs, targets):
        mean = torch.cat([t["boxes"] for t in targets]).mean(0)
        return super().forward(outputs, [{**t, "boxes": t["boxes"] - mean} for t in targets])


class LossesOfMeans(SetCriterion):
    def loss_boxes(self, outputs, targets, indices, num_boxes):
        losses = super().loss_boxes(outputs, targets, indices, num_boxes)
        return {k: v * num_boxes / len(self.queries(indices)[0]) for k, v in losses.items()}


class DrawsForEachObject(SetCriterion):
    def loss_boxes(self, outputs, targets, indices, num_boxes):
        torch.randperm(len(self.queries(indices)[0]))
        return super().loss_boxes(outputs, targets, indices, num_boxes)


class NeedsAllImages(SetCriterion):
    def loss_boxes(self, outputs, targets, indices, num_boxes):
        if any(len(t["boxes"]) < 5 for t in targets):
            raise ValueError("too few objects")
        return super().loss_boxes(outputs, targets, indices, num_boxes)


@pytest.mark.parametrize(
    ("make", "name", "why"),
    [
        (
            lambda: SetCriterion(CostsOfMeans(), ["boxes"]),
            "CostsOfMeans.forward",
            "because one result depends on the other objects",
        ),
        (
            lambda: LossesOfMeans(HungarianMatcher(), ["boxes"]),
            "LossesOfMeans.loss_boxes",
            "because one result depends on the other objects",
        ),
        (
            lambda: DrawsForEachObject(HungarianMatcher(), ["boxes"]),
            "DrawsForEachObject.loss_boxes",
            "because it draws other random numbers for some of them",
        ),
        (
            lambda: NeedsAllImages(HungarianMatcher(), ["boxes"]),
            "NeedsAllImages.loss_boxes",
            "because it cannot run for some of them (ValueError: too few objects)",
        ),
    ],
)
def test_what_is_not_of_each_object_by_itself_runs_as_it_is_and_is_said_once(make, name, why, log):
    plain = step(make(), [20, 33])
    changed = apply(make())
    chunked = step(changed, [20, 33])
    step(changed, [20, 33])
    assert not changed.can_chunk[name]
    assert log.text.count(f"{name} runs for all objects at once, {why}") == 1
    assert relative_difference(chunked[0], plain[0]) < 1e-6
    assert torch.equal(chunked[2], plain[2])


def test_losses_in_torchscript_are_computed_again_too(monkeypatch):
    from benchmarks import detr_like

    plain = step(criterion("masks"), [20, 33])
    monkeypatch.setattr(detr_like, "mask_losses", torch.jit.script(mask_losses))
    chunked = step(criterion("masks", 7), [20, 33])
    assert relative_difference(chunked[1], plain[1]) < 1e-6


class Model(torch.nn.Module):
    """Makes its criterion anew in each forward, as those of the transformers library."""

    loss_type = "ForDetection"

    def loss_function(self, outputs, targets):
        raise NotImplementedError

    def forward(self, outputs, targets):
        return self.loss_function(outputs, targets)


def loss_of_detection(outputs, targets):
    return SetCriterion(HungarianMatcher(), ["boxes"])(outputs, targets)


def test_a_criterion_that_the_forward_makes_is_found():
    def model():
        made = Model()
        made.loss_function = loss_of_detection
        return made

    plain = step(model(), [20, 33])
    changed = apply(model())
    chunked = step(changed, [20, 33])
    assert changed.can_chunk == {"HungarianMatcher.forward": True, "SetCriterion.loss_boxes": True}
    assert relative_difference(chunked[1], plain[1]) < 1e-6


def test_classes_are_as_before_outside_of_the_model():
    originals = SetCriterion.loss_boxes, HungarianMatcher.forward
    changed = criterion("boxes", 7)
    step(changed, [20, 33])
    with pytest.raises(KeyError):
        changed({}, [])
    assert (SetCriterion.loss_boxes, HungarianMatcher.forward) == originals


def test_copies_and_pickles_look_at_chunks_too():
    changed = criterion("boxes", 7)
    for other in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        step(other, [20, 33])
        assert all(other.can_chunk.values())
    assert not changed.can_chunk


def test_a_model_with_masks_trains_the_same():
    cfg = tiny_cfg()
    cfg.MODEL.META_ARCHITECTURE = "SmallDetr"
    add_detr_config(cfg)
    batch, found = images(2, num_instances=12), []
    for chunk_size in (None, 5):
        model = tiny_model(cfg)
        model = apply(model, chunk_size) if chunk_size else model
        torch.manual_seed(0)
        with EventStorage():
            sum(model(batch).values()).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert model.can_chunk
    assert all(model.can_chunk.values())
    assert relative_difference(found[1], found[0]) < 1e-6


def test_detr_of_the_transformers_library_trains_the_same():
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    layers = {f"{k}_{n}": 1 for k in ("encoder", "decoder") for n in ("layers", "attention_heads")}
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "num_queries": 20}
    config = transformers.DetrConfig(
        backbone_config=backbone, num_labels=3, dropout=0.0, **layers, **sizes
    )
    found = []
    for chunk_size in (None, 5):
        torch.manual_seed(0)
        model = transformers.DetrForObjectDetection(config).train()
        model = apply(model, chunk_size) if chunk_size else model
        targets = random_targets([9, 7])
        labels = [{"class_labels": t["labels"] % 3, "boxes": t["boxes"]} for t in targets]
        model(pixel_values=torch.rand(2, 3, 64, 64), labels=labels).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert model.can_chunk == {"HungarianMatcher.forward": True, "ImageLoss.loss_boxes": True}
    assert relative_difference(found[1], found[0]) < 1e-6


def test_a_model_without_hungarian_matching_is_an_error():
    with pytest.raises(ConfigError, match=r"CRITERION.CHUNK_SIZE: the model has no Hungarian"):
        apply(tiny_model(tiny_cfg("faster_rcnn")))


@pytest.mark.parametrize("chunk_size", [0, -3, "all"])
def test_a_chunk_size_that_cannot_work_is_an_error(chunk_size):
    with pytest.raises(ConfigError, match=f"CRITERION.CHUNK_SIZE .* got {chunk_size!r}"):
        apply(None, chunk_size)
