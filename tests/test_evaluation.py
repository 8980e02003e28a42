# Copyright (c) the d2_memfit developers.
import json

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances

from d2_memfit import compat, get_cfg
from d2_memfit.data import register_coco
from d2_memfit.evaluation import build_evaluator


def test_the_fast_evaluation_is_used_where_it_was_compiled(coins, tmp_path):
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(tmp_path)
    evaluator = build_evaluator(cfg, "coins_val")
    assert isinstance(evaluator, COCOEvaluator)
    assert evaluator._use_fast_impl is compat.has_compiled_ops()


def test_a_dataset_of_unknown_type_is_named(tmp_path):
    MetadataCatalog.get("made_up").evaluator_type = "made_up_type"
    with pytest.raises(NotImplementedError, match=r"'made_up'.*'made_up_type'"):
        build_evaluator(get_cfg(), "made_up")


def test_keypoints_that_are_not_cocos_are_evaluated(tmp_path):
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [8, 8, 40, 40], "iscrowd": 0}
    annotation.update(area=1600, keypoints=[10, 10, 2, 40, 40, 2], num_keypoints=2)
    category = {"id": 1, "name": "stick", "keypoints": ["one", "other"], "skeleton": []}
    images = [{"id": 1, "file_name": "1.png", "height": 64, "width": 64}]
    file = tmp_path / "sticks.json"
    file.write_text(
        json.dumps({"images": images, "annotations": [annotation], "categories": [category]})
    )
    register_coco("sticks", str(file), str(tmp_path))
    DatasetCatalog.get("sticks")  # it tells how categories are numbered
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(tmp_path)
    cfg.TEST.KEYPOINT_OKS_SIGMAS = [0.05, 0.05]
    found = Instances((64, 64))
    found.pred_boxes = Boxes(torch.tensor([[8.0, 8, 48, 48]]))
    found.scores, found.pred_classes = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    found.pred_keypoints = torch.tensor([[[10.0, 10, 1], [40, 40, 1]]])
    evaluator = build_evaluator(cfg, "sticks")
    evaluator.reset()
    evaluator.process([{"image_id": 1}], [{"instances": found}])
    assert evaluator.evaluate()["keypoints"]["AP"] == pytest.approx(100)
