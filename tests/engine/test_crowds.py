# Copyright (c) the d2_memfit developers.
"""Training on crowded images, a few objects at a time: of each family, as without."""

import pytest
import torch
from injection import InjectedTrainer, Injector, iterate, scripted, seed_all
from tiny import image, parameters, relative_difference, tiny_cfg, tiny_model
from tiny_transformers import tiny_transformers_cfg

from d2_memfit.config.settings import NormalizerOptions, RecoveryOptions
from d2_memfit.techniques.registry import apply_techniques, techniques_on

pytest.importorskip("transformers")
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


def train(family, few_at_a_time, fail_at=0, sizes=None):
    """Two iterations. The second one fails at an allocation, or has these micro-batches."""
    seed_all()
    model = model_of(family, few_at_a_time)
    loader = [
        [image(4 * i + k, size=128, num_instances=n) for k, n in enumerate(CROWD)] for i in range(2)
    ]
    trainer = InjectedTrainer(
        model,
        loader,
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
        recovery=RecoveryOptions(),
        normalizers=NormalizerOptions("off"),  # testing the losses takes longer than all else
    )
    iterate(trainer)
    trainer.injector = Injector([fail_at])
    if sizes:
        trainer.cutter.take = scripted(sizes)
    iterate(trainer, first=1)
    return parameters(model), trainer.window_sizes, trainer.recovery.totals.oom_events


@EACH_FAMILY
def test_weights_are_those_of_all_objects_at_once(family):
    plain, few = (train(family, is_on)[0] for is_on in (False, True))
    start = parameters(model_of(family, False))
    assert relative_difference(plain, start) > 0
    steps = [{k: v - start[k] for k, v in found.items()} for found in (few, plain)]
    assert relative_difference(*steps) < 1e-5


@EACH_FAMILY
def test_images_that_run_again_give_the_weights_of_an_undisturbed_run(family):
    failed, sizes, num_events = train(family, True, fail_at=600)
    assert (sizes, num_events) == ((1, 1), 1)
    assert_equal(failed, train(family, True, sizes=sizes)[0])


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
