# Copyright (c) the d2_memfit developers.
import pytest
from detectron2.config import get_cfg

from d2_memfit import model_zoo
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.files import DETECTRON2_ZOO


def test_all_configs_load():
    names = model_zoo.list_configs()
    assert names
    for name in names:
        cfg = model_zoo.get_config(name)
        assert cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS == 16


@pytest.mark.parametrize(
    "name",
    ["COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "COCO-Detection/faster_rcnn_R_50_FPN_1x"],
)
def test_a_recipe_for_one_gpu_is_detectron2s_but_for_batch_and_steps(name):
    ours = model_zoo.get_config(f"{name}_1gpu.yaml")
    assert (ours.SOLVER.IMS_PER_BATCH, ours.SOLVER.ACCUMULATION_STEPS) == (2, 8)
    ours.SOLVER.IMS_PER_BATCH = 16
    del ours.SOLVER["ACCUMULATION_STEPS"]
    del ours["MEMFIT"]
    theirs = get_cfg()
    theirs.merge_from_file(str(DETECTRON2_ZOO / f"{name}.yaml"))
    assert ours == theirs


def test_an_unknown_config_is_answered_with_near_ones():
    with pytest.raises(ConfigError, match=r"did you mean .*mask_rcnn_R_50_FPN_3x\.yaml"):
        model_zoo.get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_9x.yaml")
