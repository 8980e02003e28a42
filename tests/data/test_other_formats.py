# Copyright (c) the d2_memfit developers.
"""Datasets of YOLO and Pascal VOC, by the lines of GETTING_STARTED, which are run as they stand."""

import json
import shutil

import numpy as np
import pytest
from forks import run_forked
from pycocotools import mask as coco_masks
from test_docs import blocks
from tiny import ROOT, read_metrics, tiny_cfg

OF_YOLO, OF_VOC = blocks(ROOT / "docs" / "GETTING_STARTED.md", "python", until="## 3.")
(LINE_OF_YOLO,) = [line for line in OF_YOLO.splitlines(True) if line.startswith("data = ")]
CODE = {"my_yolo/images": OF_YOLO, "my_voc/JPEGImages": OF_YOLO.replace(LINE_OF_YOLO, OF_VOC)}


def outlines_by_image(coins):
    """Sizes of photographs and outlines of their coins, between pixels."""
    coco, found = json.loads((coins / "val.json").read_text()), {}
    for image in coco["images"]:
        outlines = [
            np.reshape(a["segmentation"][0], (-1, 2)) + 0.37
            for a in coco["annotations"]
            if a["image_id"] == image["id"]
        ]
        found[image["file_name"]] = (image["width"], image["height"]), outlines
    return found


def write_yolo(folder, photographs, outlines):
    shutil.copytree(photographs, folder / "images")
    (folder / "labels").mkdir()
    (folder / "data.yaml").write_text("names: [coin]\n")
    for name, (size, objects) in outlines.items():
        rows = [" ".join(map(str, [0, *(outline / size).ravel()])) for outline in objects]
        (folder / "labels" / name).with_suffix(".txt").write_text("\n".join(rows))


def write_voc(folder, photographs, outlines):
    shutil.copytree(photographs, folder / "JPEGImages")
    (folder / "Annotations").mkdir()
    for name, (_, objects) in outlines.items():
        text = ""
        for outline in objects:
            (x0, y0), (x1, y1) = outline.min(axis=0), outline.max(axis=0)
            corners = enumerate(outline + 1, 1)
            polygon = "".join(f"<x{i}>{x}</x{i}><y{i}>{y}</y{i}>" for i, (x, y) in corners)
            text += (
                f"<object><name>coin</name><bndbox><xmin>{x0 + 1}</xmin><ymin>{y0 + 1}</ymin>"
                f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox><polygon>{polygon}</polygon></object>"
            )
        file = (folder / "Annotations" / name).with_suffix(".xml")
        file.write_text(f"<annotation>{text}</annotation>")


def overlap(size, outline, annotation):
    """IoU of an object and of its converted mask."""
    one, other = (
        coco_masks.merge(coco_masks.frPyObjects([list(map(float, p)) for p in mask], *size[::-1]))
        for mask in ([outline.ravel()], annotation["segmentation"])
    )
    return float(coco_masks.iou([one], [other], [0])[0, 0])


@pytest.mark.parametrize("images", CODE)
def test_the_lines_of_the_page_keep_all_objects_and_train_takes_them(
    images, coins, tmp_path, monkeypatch
):
    pytest.importorskip("supervision")
    monkeypatch.chdir(tmp_path)
    outlines = outlines_by_image(coins)
    name = images.partition("/")[0]
    (write_yolo if name == "my_yolo" else write_voc)(tmp_path / name, coins / "val", outlines)
    exec(CODE[images])

    coco = json.loads((tmp_path / "annotations.json").read_text())
    assert [c["name"] for c in coco["categories"]] == ["coin"]
    annotations, overlaps = coco["annotations"], []
    assert [a["id"] for a in annotations] == list(range(1, len(annotations) + 1))
    for image in coco["images"]:
        size, objects = outlines[image["file_name"]]
        converted = [a for a in annotations if a["image_id"] == image["id"]]
        assert len(objects) == len(converted)
        for outline, annotation in zip(objects, converted):
            overlaps.append(overlap(size, outline, annotation))
            x, y, w, h = annotation["bbox"]
            expected = [*outline.min(axis=0), *outline.max(axis=0)]
            assert np.allclose([x, y, x + w, y + h], expected, atol=1e-3)
            assert annotation["iscrowd"] == 0
    assert np.mean(overlaps) > 0.95
    assert min(overlaps) > 0.85

    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 2
    (tmp_path / "tiny.yaml").write_text(cfg.dump())
    options = ["--config-file", "tiny.yaml", "--coco", "my", "annotations.json", images]
    keys = ["OUTPUT_DIR", "output", "SOLVER.MAX_ITER", 10]
    result = run_forked("-m", "d2_memfit", "train", *options, "--hold-out", 0.2, *keys)
    assert result.returncode == 0, result.stderr
    assert read_metrics(tmp_path / "output")[-1]["iteration"] == 10  # that of the evaluation
