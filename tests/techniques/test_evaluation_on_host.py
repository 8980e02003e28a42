# Copyright (c) the d2_memfit developers.
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.detr_like import add_detr_config
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.errors import ConfigError
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import get_technique, ready_to_evaluate
from d2_memfit.techniques.support import lazy_rows
from d2_memfit.techniques.support.lazy_rows import LazyRows

pytestmark = pytest.mark.slow


def apply(model):
    return get_technique("EvaluationOnHost").apply(model, tiny_cfg())


def outputs(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


def batch_of(size):
    """Images that come from files of this size."""
    return [{**image, "height": size, "width": size + 10} for image in images(2)]


def test_the_evaluators_json_is_the_same():
    plain = outputs(tiny_model(tiny_cfg("mask_rcnn")), batch_of(100))
    lazy = outputs(apply(tiny_model(tiny_cfg("mask_rcnn"))), batch_of(100))
    for p, x in zip(plain, lazy):
        assert len(p["instances"]) > 0
        assert isinstance(x["instances"].pred_masks, LazyRows)
        expected = instances_to_coco_json(p["instances"], 1)
        assert instances_to_coco_json(x["instances"].to("cpu"), 1) == expected


def test_masks_can_be_used_as_the_tensor_that_they_stand_for():
    (plain,), (lazy,) = (
        outputs(m, batch_of(100)[:1])
        for m in (tiny_model(tiny_cfg("mask_rcnn")), apply(tiny_model(tiny_cfg("mask_rcnn"))))
    )
    tensor, masks = plain["instances"].pred_masks, lazy["instances"].pred_masks
    assert len(masks) == len(tensor)
    assert torch.equal(masks[1], tensor[1])
    assert torch.equal(torch.stack(list(masks)), tensor)
    assert np.array_equal(np.asarray(masks), tensor.numpy())
    chosen = lazy["instances"][lazy["instances"].scores > lazy["instances"].scores.median()]
    assert 0 < len(chosen.pred_masks) < len(masks)
    assert torch.equal(chosen.pred_masks[0], tensor[0])


@pytest.mark.parametrize(
    "family", ["proposal_network", "faster_rcnn", "keypoint_rcnn", "retinanet"]
)
def test_models_without_masks_give_the_same(family):
    plain = outputs(tiny_model(tiny_cfg(family)), batch_of(100))
    changed = outputs(apply(tiny_model(tiny_cfg(family))), batch_of(100))
    for p, c in zip(plain, changed):
        (kind,) = p
        for name, value in p[kind].get_fields().items():
            other = c[kind].get(name)
            assert torch.equal(getattr(other, "tensor", other), getattr(value, "tensor", value))


def test_memory_does_not_grow_with_the_number_of_masks():
    cfg = tiny_cfg("mask_rcnn")
    batch, peaks = batch_of(1000)[:1], []
    for model in (tiny_model(cfg), apply(tiny_model(cfg))):
        with TensorMeter() as meter:
            (result,) = outputs(model, batch)
            instances_to_coco_json(result["instances"], 1)
        peaks.append(meter.peak_bytes)
    masks = len(result["instances"]) * 1000 * 1010
    assert peaks[0] > masks
    assert peaks[1] < peaks[0] - 0.7 * masks


def test_a_dataset_is_evaluated_to_the_same_ap(coins):
    from d2_memfit.evaluation import build_coco_evaluator

    cfg = tiny_cfg("mask_rcnn")
    loader = [[image] for image in coins_images()]
    results = []
    for model in (tiny_model(cfg), apply(tiny_model(cfg))):
        evaluator = build_coco_evaluator("coins_val", None)
        results.append(inference_on_dataset(model, loader, evaluator))
    assert isinstance(evaluator, COCOEvaluator)
    np.testing.assert_equal(results[1], results[0])


def coins_images():
    import json

    file = MetadataCatalog.get("coins_val").json_file
    for entry in json.loads(Path(file).read_text())["images"]:
        image = images(1, first=entry["id"])[0]
        yield {**image, **{k: entry[k] for k in ("height", "width")}, "image_id": entry["id"]}


def test_test_time_augmentation_runs_on_the_host_too():
    cfg = tiny_cfg("mask_rcnn")
    cfg.TEST.AUG.MIN_SIZES = (64,)
    cfg.TEST.AUG.MAX_SIZE = 128
    model = GeneralizedRCNNWithTTA(cfg, tiny_model(cfg).eval())
    (plain,) = outputs(model, images(1))
    (lazy,) = outputs(apply(model), images(1))
    masks = lazy["instances"].pred_masks
    assert torch.equal(torch.as_tensor(np.asarray(masks)), plain["instances"].pred_masks)


def test_the_model_is_left_as_it_was():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MEMFIT.EVALUATION.ON_HOST = True
    model = tiny_model(cfg)
    original = type(model)
    with ready_to_evaluate(model, cfg):
        assert isinstance(outputs(model, batch_of(100))[0]["instances"].pred_masks, LazyRows)
        with EventStorage():
            assert "loss_mask" in model.train()(images(1))
    assert type(model) is original


def test_panoptic_results_are_the_same():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.META_ARCHITECTURE = "PanopticFPN"
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 3
    cfg.MODEL.SEM_SEG_HEAD.CONVS_DIM, cfg.MODEL.SEM_SEG_HEAD.NORM = 16, ""
    cfg.MODEL.PANOPTIC_FPN.COMBINE.INSTANCES_CONFIDENCE_THRESH = 0.0
    plain = outputs(tiny_model(cfg), batch_of(100))
    lazy = outputs(apply(tiny_model(cfg)), batch_of(100))
    for p, x in zip(plain, lazy):
        assert torch.equal(p["panoptic_seg"][0], x["panoptic_seg"][0])
        assert p["panoptic_seg"][1] == x["panoptic_seg"][1]
        assert torch.equal(p["sem_seg"], x["sem_seg"])


def model_with_queries():
    cfg = tiny_cfg()
    add_detr_config(cfg)
    cfg.MODEL.META_ARCHITECTURE = "SmallDetr"
    cfg.TEST.DETECTIONS_PER_IMAGE = 20
    return tiny_model(cfg)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(lazy_rows, "_CHUNK_BYTES", 2**14)


def test_masks_of_queries_come_one_at_a_time_with_the_same_codes(small_chunks):
    plain = outputs(model_with_queries(), batch_of(100))
    lazy = outputs(apply(model_with_queries()), batch_of(100))
    for p, x in zip(plain, lazy):
        assert isinstance(x["instances"].pred_masks, LazyRows)
        assert torch.equal(x["instances"].pred_classes, p["instances"].pred_classes)
        torch.testing.assert_close(x["instances"].scores, p["instances"].scores, rtol=1e-6, atol=0)
        expected, found = (
            [{**entry, "score": None} for entry in instances_to_coco_json(r["instances"], 1)]
            for r in (p, x)
        )
        assert len(found) == 20
        assert found == expected
        assert torch.equal(x["panoptic_seg"][0], p["panoptic_seg"][0])
        assert x["panoptic_seg"][1] == p["panoptic_seg"][1]


def test_memory_does_not_grow_with_the_number_of_queries(monkeypatch):
    mask = 600 * 610 * 4
    monkeypatch.setattr(lazy_rows, "_CHUNK_BYTES", mask)
    peaks = []
    for model in (model_with_queries(), apply(model_with_queries())):
        with TensorMeter() as meter:
            (result,) = outputs(model, batch_of(600)[:1])
            instances_to_coco_json(result["instances"], 1)
        peaks.append(meter.peak_bytes)
    assert peaks[0] > 60 * mask
    assert peaks[1] < 10 * mask


def test_scores_of_classes_are_compared_one_class_at_a_time(small_chunks):
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 20
    cfg.MODEL.SEM_SEG_HEAD.CONVS_DIM, cfg.MODEL.SEM_SEG_HEAD.NORM = 16, ""
    plain = outputs(tiny_model(cfg), batch_of(100))
    lazy = outputs(apply(tiny_model(cfg)), batch_of(100))
    for p, x in zip(plain, lazy):
        assert isinstance(x["sem_seg"], LazyRows)
        assert torch.equal(x["sem_seg"].argmax(dim=0), p["sem_seg"].argmax(dim=0))


def test_a_model_that_writes_into_its_masks_has_all_of_them_and_is_told(small_chunks, log):
    class Writing(type(model_with_queries())):
        def result(self, logits, masks, image_size, image):
            return {"instances": masks.sigmoid_()[0]}

    found = []
    for change in (lambda model: model, apply):
        model = model_with_queries()
        model.__class__ = Writing
        found.append(outputs(change(model), batch_of(100)))
    assert torch.equal(found[1][0]["instances"], found[0][0]["instances"])
    assert log.text.count("writes into masks that are computed when they are needed") == 1


def test_a_value_that_is_no_bool_is_an_error():
    cfg = tiny_cfg()
    cfg.MEMFIT.EVALUATION.ON_HOST = "yes"
    with pytest.raises(ConfigError, match=r"EVALUATION.ON_HOST must be True or False, got 'yes'"):
        get_technique("EvaluationOnHost").is_on(cfg)
