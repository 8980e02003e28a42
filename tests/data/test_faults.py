# Copyright (c) the d2_memfit developers.
"""Faults of dataset dicts and image files: each is found, counted and named."""

import numpy as np
import pytest
from detectron2.structures import BoxMode
from PIL import Image
from pycocotools import mask as coco_masks

from d2_memfit import get_cfg
from d2_memfit.common.errors import DataError
from d2_memfit.data.faults import (
    check,
    kinds_of,
    look_at_annotations,
    look_at_images,
    warnings_about,
)

NAN = float("nan")
TRIANGLE = [1.0, 1.0, 9.0, 1.0, 9.0, 9.0]


def annotation(**changes):
    whole = {
        "bbox": [1.0, 1.0, 8.0, 8.0],
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": 0,
        "iscrowd": 0,
        "segmentation": [TRIANGLE],
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not ...}


def code_of(size=(20, 30), compressed=True):
    """The run-length code of a mask that is a box."""
    mask = np.zeros(size, np.uint8, order="F")
    mask[1:9, 1:9] = 1
    if compressed:
        return coco_masks.encode(mask)
    changes = np.flatnonzero(np.diff(mask.ravel("F"), prepend=0, append=2))
    return {"size": list(size), "counts": np.diff(changes, prepend=0).tolist()}


def dicts_of(*annotations):
    good = [annotation() for _ in range(3)]
    return [
        {"file_name": "a.png", "image_id": 0, "height": 20, "width": 30, "annotations": good},
        {"file_name": "b.png", "image_id": 1, "height": 20, "width": 30}
        | {"annotations": list(annotations)},
    ]


def cfg_of(mask_format="polygon", **model):
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = True
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    cfg.MODEL.update(model)
    cfg.INPUT.MASK_FORMAT = mask_format
    return cfg


def warnings_of(dicts, cfg=None, names=("ring", "coin")):
    return warnings_about(cfg or cfg_of(), look_at_annotations(dicts), names)


def test_nothing_is_said_of_what_is_good():
    corners = annotation(bbox=np.array([1, 1, 9, 9]), bbox_mode=BoxMode.XYXY_ABS)
    turned = annotation(bbox=[5, 5, 8, 8, 45.0], bbox_mode=BoxMode.XYWHA_ABS)
    over_the_edge = [annotation(bbox=box) for box in ([25, 15, 8, 7], [-1.5, -2, 9, 9])]
    lines = [annotation(bbox=box) for box in ([5, 5, 1, 9], [0, 0, 30, 1])]
    crowd = annotation(bbox=[NAN] * 4, iscrowd=1)  # not trained on
    good = [corners, turned, *over_the_edge, *lines, crowd, annotation(category_id=np.int64(1))]
    assert warnings_of(dicts_of(*good)) == []
    masks = [code_of(), code_of(compressed=False), np.ones((20, 30))]
    codes = [annotation(segmentation=mask) for mask in masks]
    assert warnings_of(dicts_of(*codes), cfg_of("bitmask")) == []
    anywhere = dicts_of(annotation(bbox=[400, 900, 50, 50]))
    del anywhere[1]["height"]
    assert warnings_of(anywhere) == []


WRONG = [
    {"bbox": [NAN, 1, 2, 3]},
    {"bbox": [9, 9, 4, 3], "bbox_mode": BoxMode.XYXY_ABS},
    {"bbox": [12, 9, 20, 18]},
    {"bbox": [40, 9, 5, 5]},
    {"bbox": [0.1, 0.2, 0.5, 0.5]},
    {"bbox": [9, 9, 4]},
    {"bbox": "9 9 4 4"},
    {"category_id": 2},
    {"category_id": "coin"},
    {"segmentation": ...},
    {"segmentation": [[*TRIANGLE, 1]]},
    {"segmentation": code_of()},
    {"segmentation": code_of((30, 20))},
    {"segmentation": {"size": [20, 30], "counts": b"`4X"}},  # cut off
    {"segmentation": [[10**400, *TRIANGLE[1:]]]},
]


@pytest.mark.parametrize("change", WRONG, ids=" ".join)
def test_a_fault_is_counted_and_the_first_is_named(prose, change):
    (line,) = warnings_of(dicts_of(annotation(**change)))
    assert "object 0 of b.png" in line
    assert "\n" not in line
    prose(line)


def test_it_is_an_error_if_most_boxes_are_wrong():
    wrong = [annotation(bbox=[9, 9, 0, 3])] * 4
    with pytest.raises(DataError, match=r"^mine: 4 of 7 ") as e:
        check(look_at_annotations(dicts_of(*wrong)), {"box"}, "mine: ")
    assert str(e.value).count(" of b.png, bbox [") == 3  # examples
    check(look_at_annotations(dicts_of(*wrong[1:])), {"box"})


@pytest.mark.parametrize("corner", [NAN, float("inf"), 1e9, "a"])
@pytest.mark.parametrize("kind", [list, np.array])
def test_a_polygon_that_would_take_all_memory_is_an_error(corner, kind):
    wrong = annotation(segmentation=[kind([corner, *TRIANGLE[1:]])])
    summary = look_at_annotations(dicts_of(wrong))
    with pytest.raises(DataError, match=r"1 of 4 objects have a polygon .* object 0 of b\.png"):
        check(summary, kinds_of(cfg_of()))
    check(summary, kinds_of(cfg_of(MASK_ON=False)))


def test_a_fault_of_masks_is_an_error_in_a_coco_file_which_can_be_corrected():
    summary = look_at_annotations(dicts_of(annotation(segmentation=...)))
    check(summary, {"mask"})
    with pytest.raises(DataError, match="1 of 4 objects have no mask"):
        check(summary, {"mask"}, in_file=True)


def test_images_with_objects_are_counted_without_those_of_crowds():
    summary = look_at_annotations([*dicts_of(annotation(iscrowd=1)), *dicts_of(annotation())])
    assert (summary.num_images, summary.num_images_with_objects, summary.num_objects) == (4, 3, 7)


def test_what_the_model_does_not_learn_may_be_missing():
    (warning,) = warnings_of(dicts_of(annotation()), cfg_of(KEYPOINT_ON=True))
    assert warning.startswith("MODEL.KEYPOINT_ON is True, but 4 of 4 objects have no keypoints")
    cfg = cfg_of(MASK_ON=False, META_ARCHITECTURE="ProposalNetwork")
    assert warnings_of(dicts_of(annotation(segmentation=..., category_id=7)), cfg) == []


def test_the_number_of_classes_is_compared_with_the_names():
    (warning,) = warnings_of(dicts_of(), names=["ring"])
    assert warning.startswith("MODEL.ROI_HEADS.NUM_CLASSES is 2, but the dataset has 1 classes (r")
    assert warnings_of(dicts_of(), names=None) == []


def save_turned(image, file):
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(file, exif=exif)


@pytest.mark.parametrize(
    ("suffix", "save"),
    [
        ("png", lambda image, file: None),
        ("png", lambda image, file: file.write_bytes(b"")),
        ("jpg", lambda image, file: image.resize((9, 9)).save(file)),
        ("jpg", save_turned),
        ("png", save_turned),
    ],
    ids=range(5),
)
def test_images_are_looked_into(prose, tmp_path, suffix, save):
    dicts = dicts_of(annotation())
    for number, entry in enumerate(dicts):
        file = tmp_path / f"{number}.{suffix}"
        entry["file_name"] = str(file)
        (save if number else Image.Image.save)(Image.new("RGB", (30, 20)), file)
    summary = look_at_annotations(dicts)
    look_at_images(summary, dicts)
    (warning,) = warnings_about(None, summary, None)
    prose(warning)


def test_names_command_no_terminal(tmp_path):
    dicts = dicts_of(annotation(bbox=[NAN] * 4))
    dicts[1]["file_name"] = str(tmp_path / "a\n\x1b[31m.png")
    summary = look_at_annotations(dicts)
    look_at_images(summary, dicts[1:])
    boxes, missing = warnings_about(None, summary, None)
    assert r"a\n\x1b[31m.png, bbox [nan, nan, nan, nan]" in boxes
    assert missing.endswith(r"a\n\x1b[31m.png")
