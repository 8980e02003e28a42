# Copyright (c) the d2_memfit developers.
"""Predictions in a file, evaluated in parts, are worth what Detectron2's evaluation says."""

import json
import os
import random
import time

import numpy as np
import psutil
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances
from forks import run_forked
from tiny import tiny_cfg

from d2_memfit import MemfitTrainer
from d2_memfit.data import register_coco
from d2_memfit.errors import ConfigError
from d2_memfit.evaluation import coco_evaluators
from d2_memfit.evaluation import in_parts as evaluation_in_parts
from d2_memfit.evaluation.spilled_predictions import SpilledPredictions
from d2_memfit.settings import check_settings

pytestmark = pytest.mark.slow

NAME, SIZE = "in_parts", 60
KEYPOINTS = 3
CLASSES = [4, 7, 9]  # ids of the dataset; the model's are 0 to 2


def some_box(rng):
    x, y, w, h = (rng.uniform(0, 40) for _ in range(4))
    return [x, y, w + 1, h + 1]


def some_mask(rng):
    mask = np.zeros((SIZE, SIZE), dtype=np.uint8, order="F")
    x, y = rng.randrange(40), rng.randrange(40)
    mask[y : y + rng.randrange(1, 20), x : x + rng.randrange(1, 20)] = 1
    rle = mask_util.encode(mask)
    return {"size": rle["size"], "counts": rle["counts"].decode()}


def some_keypoints(rng):
    return [rng.choice([0, 1, 2]) if i % 3 == 2 else rng.uniform(0, SIZE) for i in range(9)]


def some_annotation(rng, number, image_id):
    box = some_box(rng)
    keypoints = some_keypoints(rng)
    return {
        "id": number,
        "image_id": image_id,
        "category_id": rng.choice(CLASSES),
        "bbox": box,
        "area": box[2] * box[3] * rng.choice([0.5, 5]),  # of two ranges of areas
        "iscrowd": int(rng.random() < 0.1),
        "segmentation": some_mask(rng),
        "keypoints": keypoints,
        "num_keypoints": sum(v > 0 for v in keypoints[2::3]),
    }


def register(folder, num_images, objects, every=1):
    rng = random.Random(0)
    ids = rng.sample(range(1000000), num_images)
    images = [{"id": i, "file_name": f"{i}.png", "height": SIZE, "width": SIZE} for i in ids]
    of_images = [i for i in ids[::every] for _ in range(rng.randrange(objects + 1))]
    annotations = [some_annotation(rng, n + 1, i) for n, i in enumerate(of_images)]
    names = [{"id": c, "name": f"class {c}", "keypoints": ["a", "b", "c"]} for c in CLASSES]
    json_file = folder / f"{NAME}.json"
    whole = {"info": {}, "images": images, "annotations": annotations, "categories": names}
    json_file.write_text(json.dumps(whole))
    register_coco(NAME, str(json_file), str(folder))
    DatasetCatalog.get(NAME)  # it tells how categories are numbered
    return ids, annotations


@pytest.fixture
def dataset(tmp_path):
    yield register(tmp_path, 31, 6)
    DatasetCatalog.remove(NAME)
    MetadataCatalog.remove(NAME)


def predictions(ids, annotations, seed=1):
    """Near what is annotated, some of them twice, some scores equal; and others."""
    rng = random.Random(seed)
    for image_id in ids:
        found = []
        near = [a for a in annotations if a["image_id"] == image_id]
        for a in near * 2 + [some_annotation(rng, 0, image_id) for _ in range(rng.randrange(9))]:
            box = [n + rng.uniform(-3, 3) for n in a["bbox"]]
            mask = a["segmentation"] if rng.random() < 0.5 else some_mask(rng)
            found.append(
                {
                    "image_id": image_id,
                    "category_id": CLASSES.index(a["category_id"]),
                    "bbox": [box[0], box[1], abs(box[2]), abs(box[3])],
                    "score": rng.choice([0.5, rng.random()]),
                    "segmentation": mask,
                    "keypoints": [n + rng.uniform(0, 2) for n in a["keypoints"]],
                }
            )
        if rng.random() < 0.9:  # some images are not predicted on
            yield {"image_id": image_id, "instances": found if rng.random() < 0.9 else []}


def evaluated(folder, found, img_ids=None, **options):
    """Results, and the files that were written."""
    options = {"kpt_oks_sigmas": [0.1] * KEYPOINTS, "use_fast_impl": False, **options}
    evaluator = COCOEvaluator(NAME, output_dir=str(folder), **options)
    evaluator.reset()
    for prediction in found:
        evaluator._predictions.append(prediction)
    results = evaluator.evaluate(img_ids)
    if isinstance(evaluator._predictions, SpilledPredictions):  # it may be called again
        np.testing.assert_equal(dict(evaluator.evaluate(img_ids)), dict(results))
    written = json.loads((folder / "coco_instances_results.json").read_text())
    return results, written, torch.load(folder / "instances_predictions.pth")


@pytest.fixture
def cfg():
    cfg = tiny_cfg(fpn=False)
    cfg.MEMFIT.EVALUATION.ON_DISK = True
    return cfg


@pytest.mark.parametrize("images_in_part", [1, 7, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_dets_per_image": 2},
        {"max_dets_per_image": 300, "tasks": ("bbox",)},
        {"use_fast_impl": True, "tasks": ("segm",)},
    ],
    ids=str,
)
def test_results_and_files_are_those_of_detectron2(
    dataset, cfg, tmp_path, monkeypatch, options, images_in_part
):
    monkeypatch.setattr(evaluation_in_parts, "_IMAGES", images_in_part)
    (tmp_path / "whole").mkdir()
    expected = evaluated(
        tmp_path / "whole", predictions(*dataset), **{**options, "use_fast_impl": False}
    )
    with coco_evaluators(cfg):
        found = evaluated(tmp_path / "parts", predictions(*dataset), **options)
    assert {task: list(of_task) for task, of_task in found[0].items()} == {
        task: list(of_task) for task, of_task in expected[0].items()
    }
    for task, of_task in expected[0].items():
        for name, value in of_task.items():
            np.testing.assert_equal(found[0][task][name], value)  # to the last bit, or NaN
    assert expected[0]["segm" if "tasks" in options and "segm" in options["tasks"] else "bbox"]
    assert found[1:] == expected[1:]


def test_some_of_the_images(dataset, cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_in_parts, "_IMAGES", 3)
    (tmp_path / "whole").mkdir()
    chosen = dataset[0][::4]
    expected = evaluated(tmp_path / "whole", predictions(*dataset), chosen)
    with coco_evaluators(cfg):
        found = evaluated(tmp_path / "parts", predictions(*dataset), chosen)
    np.testing.assert_equal(dict(found[0]), dict(expected[0]))


def test_images_of_another_dataset_are_an_error_as_in_pycocotools(dataset, cfg, tmp_path):
    found = [*predictions(*dataset)]
    found[0]["image_id"] = found[0]["instances"][0]["image_id"] = -1
    with (
        coco_evaluators(cfg),
        pytest.raises(AssertionError, match="Results do not correspond to current coco set"),
    ):
        evaluated(tmp_path, found)


def test_nothing_found_is_no_number(dataset, cfg, tmp_path):
    for found in ([], [{"image_id": dataset[0][0], "instances": []}]):
        evaluator = COCOEvaluator(NAME, output_dir=str(tmp_path))
        expected = None
        for on_disk in (False, True):
            cfg.MEMFIT.EVALUATION.ON_DISK = on_disk
            with coco_evaluators(cfg):
                evaluator.reset()
                for prediction in found:
                    evaluator._predictions.append(prediction)
                results = evaluator.evaluate()
            np.testing.assert_equal(dict(results), results if expected is None else expected)
            expected = dict(results)


def test_a_wrong_number_of_sigmas_is_named(dataset, cfg, tmp_path):
    with (
        coco_evaluators(cfg),
        pytest.raises(ConfigError, match="KEYPOINT_OKS_SIGMAS must have 3 numbers"),
    ):
        evaluated(tmp_path, predictions(*dataset), kpt_oks_sigmas=[0.1])


def test_instances_and_proposals_of_a_model_are_taken(dataset, cfg, tmp_path):
    """``process`` is Detectron2's. Proposals are evaluated by Detectron2, from a list."""
    found = Instances((SIZE, SIZE))
    found.pred_boxes = Boxes(torch.tensor([[8.0, 8, 48, 48]]))
    found.scores, found.pred_classes = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    proposals = Instances((SIZE, SIZE))
    proposals.proposal_boxes, proposals.objectness_logits = found.pred_boxes, torch.ones(1)
    for output in ({"instances": found}, {"proposals": proposals}):
        results = []
        for on_disk in (False, True):
            cfg.MEMFIT.EVALUATION.ON_DISK = on_disk
            with coco_evaluators(cfg):
                evaluator = COCOEvaluator(NAME, output_dir=str(tmp_path), use_fast_impl=False)
                evaluator.reset()
                evaluator.process([{"image_id": dataset[0][0]}], [output])
                results.append(evaluator.evaluate())
        assert results[0]
        np.testing.assert_equal(dict(results[1]), dict(results[0]))


def test_an_evaluator_of_ones_own_gets_what_it_can_iterate(dataset, cfg, tmp_path):
    class Counting(COCOEvaluator):
        def evaluate(self):
            return sum(len(p["instances"]) for p in self._predictions)

    with coco_evaluators(cfg):
        evaluator = Counting(NAME, output_dir=str(tmp_path))
        evaluator.reset()
        for prediction in predictions(*dataset):
            evaluator._predictions.append(prediction)
        expected = sum(len(p["instances"]) for p in predictions(*dataset))
        assert evaluator.evaluate() == expected


@pytest.mark.parametrize("takes_cfg", [True, False])
def test_a_trainer_evaluates_so(coins, tmp_path, monkeypatch, takes_cfg):
    """``MemfitTrainer.test`` with its own evaluator, or one that it is given."""
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.DATASETS.TEST = ("coins_val",)
    cfg.OUTPUT_DIR = str(tmp_path)
    model = MemfitTrainer.build_model(cfg)
    monkeypatch.setattr(evaluation_in_parts, "_IMAGES", 3)
    results, kinds = [], []

    class Evaluator(COCOEvaluator):
        def process(self, inputs, outputs):
            super().process(inputs, outputs)
            kinds.append(type(self._predictions))

    class Trainer(MemfitTrainer):
        @classmethod
        def build_evaluator(cls, cfg, name):
            return Evaluator(name, output_dir=str(tmp_path), use_fast_impl=False)

    for on_disk in (False, True):
        cfg.MEMFIT.EVALUATION.ON_DISK = on_disk
        evaluators = [] if takes_cfg else [[Trainer.build_evaluator(cfg, "coins_val")]]
        results.append(Trainer.test(cfg, model, *evaluators))
    assert set(kinds) == {list, SpilledPredictions}
    assert results[0]["segm"]
    np.testing.assert_equal(dict(results[1]), dict(results[0]))


def evaluate_on_rank(rank, folder, num_ranks):
    from pathlib import Path

    from d2_memfit.evaluation import spilled_predictions

    ids, annotations = register(Path(folder) / str(rank), 31, 6)
    cfg = tiny_cfg(fpn=False)
    spilled_predictions._SENT = 4  # several parts of each rank
    results = []
    try:
        for on_disk in (False, True):
            cfg.MEMFIT.EVALUATION.ON_DISK = on_disk
            with coco_evaluators(cfg):
                evaluator = COCOEvaluator(NAME, output_dir=folder, use_fast_impl=False)
                evaluator._kpt_oks_sigmas = [0.1] * KEYPOINTS
                evaluator.reset()
                for prediction in list(predictions(ids, annotations))[rank::num_ranks]:
                    evaluator._predictions.append(prediction)
                results.append((dict(evaluator.evaluate()),))
                written = Path(folder) / "coco_instances_results.json"
                results[-1] += (written.read_text() if rank == 0 else "",)
    finally:
        DatasetCatalog.remove(NAME)
        MetadataCatalog.remove(NAME)
    return results


def test_ranks_send_theirs_in_parts(two_ranks, tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    (expected, found), (of_other, _) = two_ranks.run(evaluate_on_rank, str(tmp_path), 2)
    assert expected[0]["bbox"]
    np.testing.assert_equal(found, expected)
    assert of_other[0] == {}


def test_a_value_that_is_no_bool_is_an_error(cfg):
    cfg.MEMFIT.EVALUATION.ON_DISK = "yes"
    with pytest.raises(ConfigError, match=r"EVALUATION.ON_DISK must be True or False, got 'yes'"):
        check_settings(cfg)


def growth_mb(folder, num_images, on_disk):
    """How much RAM an evaluation takes at its peak, beyond what the process and the annotations
    have before; 100 masks in an image, invented.
    """
    import threading

    ids, _ = register(folder, num_images, 4, every=10)  # others only take time
    cfg = tiny_cfg(fpn=False)
    cfg.MEMFIT.EVALUATION.ON_DISK = on_disk
    rng = random.Random(0)
    masks = [some_mask(rng) for _ in range(500)]
    peak, ended = 0, threading.Event()
    with coco_evaluators(cfg):
        evaluator = COCOEvaluator(NAME, tasks=("segm",), use_fast_impl=False)
        evaluator.reset()
        process = psutil.Process()
        before = process.memory_info().rss

        def watch():
            nonlocal peak
            while not ended.wait(0.05):
                peak = max(peak, process.memory_info().rss - before)

        watching = threading.Thread(target=watch)
        watching.start()
        for image_id in ids:
            instances = [
                {
                    "image_id": image_id,
                    "category_id": rng.randrange(len(CLASSES)),
                    "bbox": [1.0, 2.0, rng.random(), 4.0],
                    "score": rng.random(),
                    "segmentation": {**mask, "counts": str(mask["counts"])},
                }
                for mask in rng.sample(masks, 100)
            ]
            evaluator._predictions.append({"image_id": image_id, "instances": instances})
        results = evaluator.evaluate()
        ended.set()
        watching.join()
    assert 0 <= results["segm"]["AP"] < 50
    return peak / 2**20


def measure(folder, num_images):
    """In a process of its own, whose RAM nothing else uses."""
    script = (
        "import sys; from pathlib import Path; from test_in_parts import growth_mb;"
        f"print('growth', growth_mb(Path({str(folder)!r}), {num_images}, True))"
    )
    start = time.perf_counter()
    run = run_forked("-c", script, timeout_s=1200, cwd=os.path.dirname(__file__))
    assert run.returncode == 0, run.stderr[-3000:]
    growth = float(run.stdout.split()[-1])
    print(f"{num_images} images: {growth:.0f} MB, {time.perf_counter() - start:.0f} s")
    return growth


@pytest.mark.long
def test_ram_does_not_grow_with_the_predictions(tmp_path):
    """What is kept of 100,000 objects is 3 MB; a list of them would take 100 MB, and what
    pycocotools makes of them 600 MB. A part takes 90 MB.
    """
    assert measure(tmp_path, 1000) < 200


@pytest.mark.exhaustive
def test_two_million_masks_take_less_than_500_mb(tmp_path):
    assert measure(tmp_path, 20_000) < 500
