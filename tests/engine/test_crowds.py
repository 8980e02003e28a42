# Copyright (c) the d2_memfit developers.
"""Training on crowded images, a few objects at a time: of each family, as without."""

import pytest
import torch
from injection import iterate, seed_all
from tiny import image, parameters, relative_difference, tiny_cfg, tiny_model
from tiny_transformers import tiny_transformers_cfg

from d2_memfit import AccumulatingTrainer
from d2_memfit.config.settings import NormalizerOptions
from d2_memfit.techniques.registry import apply_techniques, techniques_on

pytest.importorskip("transformers")
FAMILIES = ["mask2former", "rf_detr", "rt_detr_v2", "mask_rcnn"]
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


def train(family, few_at_a_time):
    """Weights after two iterations."""
    seed_all()
    model = model_of(family, few_at_a_time)
    loader = [
        [image(4 * i + k, size=128, num_instances=n) for k, n in enumerate(CROWD)] for i in range(2)
    ]
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    off = NormalizerOptions("off")  # testing the losses takes longer than all else
    iterate(AccumulatingTrainer(model, loader, sgd, micro_batch_size=1, normalizers=off), 2)
    return parameters(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_all_objects_at_once(family):
    plain, few = (train(family, is_on) for is_on in (False, True))
    start = parameters(model_of(family, False))
    assert relative_difference(plain, start) > 0
    steps = [{k: v - start[k] for k, v in found.items()} for found in (few, plain)]
    assert relative_difference(*steps) < 1e-5
