# Copyright (c) the d2_memfit developers.
"""Training on crowded images, a few objects at a time: of each family, as without."""

import d2_transformers
import pytest
import resumed
import torch
from detectron2.utils.events import EventStorage
from injection import InjectedTrainer, Injector, iterate, scripted, seed_all
from tiny import image, parameters, relative_difference, tiny_cfg, tiny_model
from tiny_transformers import tiny_transformers_cfg

from d2_memfit import compat
from d2_memfit.config.settings import NormalizerOptions, RecoveryOptions
from d2_memfit.techniques.registry import apply_techniques, techniques_on

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

FAMILIES = ["mask2former", "rf_detr", "rt_detr_v2", "mask_rcnn"]
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
CROWD = (30, 7)  # objects of the images of an iteration


def model_of(family, few_at_a_time):
    if family == "mask_rcnn":
        cfg = tiny_cfg(family)
        cfg.MEMFIT.MASKS.PACKED = few_at_a_time
        cfg.MEMFIT.MATCHING.CHUNK_SIZE = 64 if few_at_a_time else None
    else:
        cfg = tiny_transformers_cfg(family, has_masks=family != "rt_detr_v2")
        cfg.MEMFIT.MASKS.PACKED = few_at_a_time
    assert bool(techniques_on("model", cfg)) == few_at_a_time
    return apply_techniques("model", tiny_model(cfg), cfg)


def train(rank, num_ranks, family, few_at_a_time, precision="fp32", fail_at=0, sizes=None):
    """Two iterations. In the second, rank 0 fails at an allocation, or has these micro-batches."""
    seed_all()
    model = model_of(family, few_at_a_time)
    trained = compat.create_ddp_model(model, broadcast_buffers=False) if num_ranks > 1 else model
    first = 2 * rank
    loader = [
        [image(first + 4 * i + k, size=128, num_instances=n) for k, n in enumerate(CROWD)]
        for i in range(2)
    ]
    trainer = InjectedTrainer(
        trained,
        loader,
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
        precision=precision,
        recovery=RecoveryOptions(),
        normalizers=NormalizerOptions("off"),  # testing the losses takes longer than all else
    )
    iterate(trainer)
    if rank == 0:
        trainer.injector = Injector([fail_at])
    if sizes and rank == 0:
        trainer.cutter.take = scripted(sizes)
    iterate(trainer, first=1)
    return parameters(model), trainer.window_sizes, trainer.recovery.totals.oom_events


@EACH_FAMILY
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_those_of_all_objects_at_once(family, precision):
    plain, few = (train(0, 1, family, is_on, precision)[0] for is_on in (False, True))
    start = parameters(model_of(family, False))
    assert relative_difference(plain, start) > 0
    steps = [{k: v - start[k] for k, v in found.items()} for found in (few, plain)]
    assert relative_difference(*steps) < (1e-5 if precision == "fp32" else 1e-2)


@EACH_FAMILY
def test_images_that_run_again_give_the_weights_of_an_undisturbed_run(family):
    failed, sizes, num_events = train(0, 1, family, True, fail_at=600)
    assert (sizes, num_events) == ((1, 1), 1)
    assert_equal(failed, train(0, 1, family, True, sizes=sizes)[0])


@EACH_FAMILY
def test_ranks_agree_and_have_the_weights_of_all_objects_at_once(family, two_ranks):
    (plain, *_), _ = two_ranks.run(train, 2, family, False)
    (first, *_), (second, *_) = two_ranks.run(train, 2, family, True)
    assert_equal(second, first)
    assert relative_difference(first, plain) < 1e-6
    (failed, sizes, _), _ = two_ranks.run(train, 2, family, True, "fp32", 600)
    (undisturbed, *_), _ = two_ranks.run(train, 2, family, True, "fp32", 0, sizes)
    assert_equal(failed, undisturbed)


@pytest.mark.parametrize("family", ["mask2former", "rf_detr"])
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted(family, coins, tmp_path):
    class Trainer(d2_transformers.Trainer):
        @classmethod
        def test(cls, cfg, model, evaluators=None):
            return {}

    def run(folder, chunk_size, *parts):
        cfg = tiny_transformers_cfg(family, has_masks=True)
        cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
        cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS, cfg.SOLVER.MAX_ITER = 2, 2, 4
        cfg.MEMFIT.MASKS.PACKED = chunk_size
        cfg.OUTPUT_DIR = str(tmp_path / folder)
        return [resumed.train(cfg, *part, Trainer) for part in parts]

    (plain,) = run("plain", False, (0, 4))
    (straight,) = run("straight", True, (0, 4))
    first, second = run("resumed", True, (0, 2), (2, 4))
    assert first["images"] + second["images"] == straight["images"] == plain["images"]
    assert first["losses"] + second["losses"] == straight["losses"]
    assert_equal(second["weights"], straight["weights"])
    assert straight["losses"] == pytest.approx(plain["losses"], rel=1e-3)


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def on_one_pixel(num):
    made = image(0, size=128, num_instances=num)
    made["instances"].gt_boxes.tensor[:] = torch.tensor([40.0, 50, 41, 51])
    made["instances"].gt_masks.tensor[:] = False
    made["instances"].gt_masks.tensor[:, 50, 40] = True
    return made


EDGES = {
    "a thousand objects on one pixel": lambda: [on_one_pixel(1000), image(1, size=128)],
    "no object": lambda: [image(i, size=128, num_instances=0) for i in range(2)],
    "one object, and none": lambda: [image(i, size=128, num_instances=1 - i) for i in range(2)],
    "images of two sizes": lambda: [image(0, 128, 40), image(1, 96, 9)],
    "empty masks": lambda: [on_one_pixel(30)][:1],
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("family", ["mask2former", "rf_detr", "mask_rcnn"])
def test_losses_and_gradients_at_edges_are_those_of_all_objects_at_once(family, edge):
    found = []
    for is_on in (False, True):
        model, batch = model_of(family, is_on), EDGES[edge]()
        if edge == "empty masks":
            batch[0]["instances"].gt_masks.tensor[:] = False
        seed_all()
        with EventStorage():
            losses = model(batch)
        sum(losses.values()).backward()
        found.append(({k: v.detach() for k, v in losses.items()}, gradients(model)))
    for plain, few in zip(*found):
        assert few.keys() == plain.keys()
        assert relative_difference(few, plain) < 1e-6


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
