# Copyright (c) the d2_memfit developers.
import json

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, BoxMode, Instances

from d2_memfit import get_cfg
from d2_memfit.cli.train import Trainer
from d2_memfit.data.registration import register_coco
from d2_memfit.engine.evaluating import evaluating


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
    evaluator = Trainer.build_evaluator(cfg, "sticks")
    evaluator.reset()
    evaluator.process([{"image_id": 1}], [{"instances": found}])
    assert evaluator.evaluate()["keypoints"]["AP"] == pytest.approx(100)


@pytest.fixture
def evaluated(coins, tmp_path, catalogs):
    """Gives the AP of perfect predictions on six coins whose annotations have some ids."""

    def evaluate(ids):
        coco = json.loads((coins / "val.json").read_text())
        coco["annotations"] = coco["annotations"][: len(ids)]
        for annotation, number in zip(coco["annotations"], ids):
            annotation["id"] = number
        file = tmp_path / "ids.json"
        file.write_text(json.dumps(coco))
        MetadataCatalog.pop("ids", None)
        MetadataCatalog.get("ids").set(json_file=str(file), evaluator_type="coco")
        evaluator = COCOEvaluator("ids", output_dir=str(tmp_path), use_fast_impl=False)
        cfg = get_cfg()
        cfg.MODEL.DEVICE = "cpu"
        with evaluating(cfg, torch.nn.Linear(1, 1)):
            evaluator.reset()
            for image in coco["images"]:
                boxes = [a["bbox"] for a in coco["annotations"] if a["image_id"] == image["id"]]
                found = Instances((image["height"], image["width"]))
                corners = BoxMode.convert(
                    torch.tensor(boxes).reshape(-1, 4), BoxMode.XYWH_ABS, BoxMode.XYXY_ABS
                )
                found.pred_boxes, found.scores = Boxes(corners), torch.ones(len(boxes))
                found.pred_classes = torch.ones(len(boxes), dtype=torch.int64)
                evaluator.process([{"image_id": image["id"]}], [{"instances": found}])
            return evaluator.evaluate()["bbox"]["AP"]

    return evaluate


@pytest.mark.parametrize("ids", [range(6), [1, 2, 3, 1, 2, 3], [-1, 1, 2, 3, 4, 5], list("abcdef")])
def test_perfect_predictions_have_an_ap_of_100_whatever_the_ids(evaluated, ids, log):
    for _ in range(2):  # as in a run that evaluates every epoch
        assert evaluated(ids) == pytest.approx(100)
    (said,) = [r for r in log.records if "The evaluation uses new numbers" in r.getMessage()]
    assert said.levelname == "WARNING"


def test_good_ids_are_left_as_they_are(evaluated, log):
    assert evaluated([7, 2, 9, 4, 5, 3]) == pytest.approx(100)
    assert not log.records
