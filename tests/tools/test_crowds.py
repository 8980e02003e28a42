# Copyright (c) the d2_memfit developers.
"""The benchmark of crowds, with as little as possible: it measures and writes its tables."""

import json
import shutil

import cv2
import numpy as np
import pytest
from benchmarks.crowds import images
from forks import run_forked
from PIL import Image
from tiny import ROOT


def crowds(docs, *arguments):
    """Lines that the benchmark writes."""
    for page in ("TECHNIQUES.md", "RECOVERY.md"):
        shutil.copy(ROOT / "docs" / page, docs)
    arguments = ("crowds", "--docs", docs, *arguments)
    result = run_forked(ROOT / "tools" / "benchmark.py", *arguments, timeout_s=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(x) for x in (docs / "crowds.jsonl").read_text().splitlines()]


def coco_file(folder):
    """A dataset of one photograph with one object, which is a triangle."""
    folder.mkdir()
    cv2.imwrite(str(folder / "one.png"), np.full((60, 80, 3), 200, np.uint8))
    annotation = {"image_id": 3, "bbox": [10, 10, 40, 30]}
    annotation["segmentation"] = [[10, 10, 50, 10, 30, 40]]
    dataset = {"images": [{"id": 3, "file_name": "one.png"}], "annotations": [annotation]}
    (folder / "one.json").write_text(json.dumps(dataset))
    return folder / "one.json", folder


@pytest.mark.parametrize("is_coco", [False, True])
def test_crowds_have_the_asked_number_of_objects_and_none_hides_another(is_coco, tmp_path):
    source = coco_file(tmp_path / "coco") if is_coco else None
    images.make_crowds(tmp_path, (3, 170), 256, source)
    dataset = json.loads((tmp_path / "crowds.json").read_text())
    for number, count in enumerate((3, 170)):
        assert Image.open(tmp_path / f"{number:03d}.png").size == (256, 256)
        objects = [a for a in dataset["annotations"] if a["image_id"] == number]
        assert len(objects) == count
        covered = np.zeros((256, 256), int)
        for x, y, width, height in (a["bbox"] for a in objects):
            covered[y : y + height, x : x + width] += 1
        assert covered.max() == 1
        assert all(len(a["segmentation"][0]) >= 6 for a in objects)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_training_under_a_limit_is_compared_with_enough_memory(tmp_path):
    arguments = ["--only", "training", "--models", "Mask R-CNN R50-FPN", "--size", 64]
    lines = crowds(tmp_path, *arguments, "--objects", 3, 5)
    assert [line["side"] for line in lines] == ["enough memory", "Detectron2", "split", "technique"]
    assert all(line["iterations"] == 2 for line in lines)
    assert all(line["difference"] < 1e-3 for line in lines)
    assert "| Mask R-CNN R50-FPN | d2_memfit |" in (tmp_path / "RECOVERY.md").read_text()
