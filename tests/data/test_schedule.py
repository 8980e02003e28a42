# Copyright (c) the d2_memfit developers.
"""The schedule of a fine-tuning, and the recipes of Detectron2 that its rule is from."""

import pytest

from d2_memfit.config.load import load_cfg
from d2_memfit.data import fine_tuning_schedule


@pytest.mark.parametrize(
    ("config", "num_images"),
    [
        ("Cityscapes/mask_rcnn_R_50_FPN.yaml", 2975),
        ("PascalVOC-Detection/faster_rcnn_R_50_FPN.yaml", 16_551),
        ("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", 117_266),
    ],
)
def test_detectron2s_own_recipes_follow_the_rule(config, num_images):
    solver = load_cfg(config).SOLVER
    schedule = fine_tuning_schedule(num_images, solver.IMS_PER_BATCH, 1000, 5000)
    assert schedule["SOLVER.MAX_ITER"] == pytest.approx(solver.MAX_ITER, rel=0.02)


def test_few_images_get_some_iterations_and_everything_happens_within_them():
    schedule = fine_tuning_schedule(61, 16, 1000, 5000)
    assert schedule == {
        "SOLVER.MAX_ITER": 300,
        "SOLVER.STEPS": (225,),
        "SOLVER.WARMUP_ITERS": 30,
        "SOLVER.CHECKPOINT_PERIOD": 100,
    }
