# Copyright (c) the d2_memfit developers.
"""What is said of dataset dicts before the first iteration, and how long it takes."""

import copy
import time

import numpy as np
import pytest
from detectron2.structures import BoxMode
from PIL import Image
from pycocotools import mask as coco_masks

from d2_memfit import get_cfg
from d2_memfit.data import (
    check_boxes,
    check_crowd,
    check_masks,
    look_at_annotations,
    look_at_dataset,
    warnings_about_data,
)
from d2_memfit.errors import DataError

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


def boxed(x, y, w, h):
    """An object whose mask is half of its box."""
    return annotation(bbox=[x, y, w, h], segmentation=[[x, y, x + w, y, x + w, y + h]])


def code_of(x, y, w, h, size=(20, 30), compressed=True):
    """The run-length code of a mask that is a box."""
    mask = np.zeros(size, np.uint8, order="F")
    mask[y : y + h, x : x + w] = 1
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


def cfg_of(**model):
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = True
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    cfg.MODEL.update(model)
    return cfg


def warnings_of(dicts, cfg=None, names=("ring", "coin")):
    summary = look_at_dataset(dicts, lambda line: None)
    return warnings_about_data(cfg or cfg_of(), summary, names)


def test_names_of_images_command_no_terminal(tmp_path):
    dicts = dicts_of(annotation(bbox=[NAN] * 4))
    dicts[1]["file_name"] = str(tmp_path / "a\n\x1b[31m.png")
    (tmp_path / "b.png").touch()
    dicts[0]["file_name"] = str(tmp_path / "b.png")
    boxes, missing, *_ = warnings_of(dicts)
    assert r"a\n\x1b[31m.png, bbox [nan, nan, nan, nan]" in boxes
    assert missing.endswith(rf"1 of 2 images do not exist, the first is {tmp_path}/a\n\x1b[31m.png")


def test_nothing_is_said_of_what_is_good():
    assert warnings_of(dicts_of(annotation(category_id=1))) == []
    assert warnings_of(dicts_of(annotation(bbox=[NAN] * 4, iscrowd=1))) == []  # not trained on
    corners = annotation(bbox=np.array([1, 1, 9, 9]), bbox_mode=BoxMode.XYXY_ABS)
    assert warnings_of(dicts_of(corners)) == []
    at_the_edge = boxed(25, 15, 8, 7), boxed(-1.5, -2, 9, 9)
    lines = boxed(5, 5, 1, 9), boxed(0, 0, 30, 1)
    assert warnings_of(dicts_of(*at_the_edge, *lines)) == []
    turned = annotation(bbox=[5, 5, 8, 8, 45.0], bbox_mode=BoxMode.XYWHA_ABS)
    assert warnings_of(dicts_of(turned)) == []
    assert warnings_of(dicts_of(annotation(category_id=np.int64(1)))) == []
    masks = [code_of(1, 1, 8, 8), code_of(1, 1, 8, 8, compressed=False), np.ones((20, 30))]
    cfg = cfg_of()
    cfg.INPUT.MASK_FORMAT = "bitmask"
    assert warnings_of(dicts_of(*[annotation(segmentation=m) for m in masks]), cfg) == []
    part_of_the_box = annotation(segmentation=[[1, 1, 1, 3, 3, 3]])
    rounded = annotation(segmentation=[[0, 0, 10, 0, 10, 10, 0, 10]])
    bow = annotation(segmentation=[[1, 1, 9, 9, 9, 1, 1, 8]])
    parts = annotation(segmentation=[[1, 1, 3, 1, 3, 3], [9, 9, 7, 9, 9, 7], [5, 5, 29, 19]])
    turned = annotation(bbox=[5, 5, 8, 8, 45.0], bbox_mode=BoxMode.XYWHA_ABS)
    assert warnings_of(dicts_of(part_of_the_box, rounded, bow, parts, turned)) == []


WRONG = {
    "nan": (annotation(bbox=[NAN, 1, 2, 3]), "1 of 4 boxes have a NaN or infinity"),
    "infinite": (annotation(bbox=[1, 1, float("inf"), 3]), "1 of 4 boxes have a NaN or infinity"),
    "negative": (annotation(bbox=[9, 9, -4, 3]), "1 of 4 boxes have a negative width or height"),
    "mode": (
        annotation(bbox=[9, 9, 4, 3], bbox_mode=BoxMode.XYXY_ABS),
        "negative width or height. Detectron2's mapper drops them silently. Is bbox_mod",
    ),
    "corners": (
        annotation(bbox=[12, 9, 20, 18]),
        "1 of 4 boxes exceed their image, but would fit it as [x0, y0, x1, y1]",
    ),
    "outside": (annotation(bbox=[40, 9, 5, 5]), "1 of 4 boxes exceed their image. Detectron2's"),
    "before it": (annotation(bbox=[-9, 9, 15, 5]), "1 of 4 boxes exceed their image. Detectron2's"),
    "corners outside": (
        annotation(bbox=[9, 9, 40, 15], bbox_mode=BoxMode.XYXY_ABS),
        "1 of 4 boxes exceed their image. Detectron2's",
    ),
    "fractions": (annotation(bbox=[0.1, 0.2, 0.5, 0.5]), "1 of 4 boxes have numbers from 0 to 1"),
    "tiny": (annotation(bbox=[9, 9, 1.5, 1]), "1 of 4 boxes are smaller than 2 pixels"),
    "huge": (annotation(bbox=[9, 9, 1e9, 5]), "1 of 4 boxes are larger than a million pixels"),
    "thin": (annotation(bbox=[9, 9, 1e-30, 5]), "1 of 4 boxes have no area"),
    "flat": (annotation(bbox=[9, 9, 4, 0]), "1 of 4 boxes have no area"),
    "three": (annotation(bbox=[9, 9, 4]), "1 of 4 objects have a bbox that is not four numbers"),
    "no box": (annotation(bbox=...), "1 of 4 objects have a bbox that is not four numbers"),
    "text box": (annotation(bbox="9 9 4 4"), "have a bbox that is not four numbers"),
    "class": (
        annotation(category_id=2),
        "category_id outside 0 to 1 (2), while MODEL.ROI_HEADS.NUM_CLASSES is 2",
    ),
    "ignored class": (annotation(category_id=-1), "1 of 4 objects have the category_id -1, which"),
    "class list": (annotation(category_id=[1]), "1 of 4 objects have the category_id [1], which"),
    "no class": (annotation(category_id=...), "1 of 4 objects have the category_id None, which"),
    "class name": (annotation(category_id="coin"), "have the category_id 'coin', which is not an"),
    "no mask": (
        annotation(segmentation=...),
        "MODEL.MASK_ON is True, but 1 of 4 objects have no mask",
    ),
    "two corners": (
        annotation(segmentation=[[1, 1, 2, 2]]),
        "1 of 4 objects have a mask without a polygon of three corners",
    ),
    "odd": (annotation(segmentation=[[*TRIANGLE, 1]]), "a polygon with an odd number of coord"),
    "code": (
        annotation(segmentation=code_of(1, 1, 8, 8)),
        "INPUT.MASK_FORMAT is polygon, but 1 of 4 masks are run-length codes. Set it to bitmask",
    ),
    "other size": (
        annotation(segmentation=code_of(1, 1, 8, 8, size=(30, 20))),
        "1 of 4 masks are run-length codes of another size than their image",
    ),
    "no counts": (
        annotation(segmentation={"size": [20, 30]}),
        "1 of 4 masks are mappings without the size and counts of a run-length code",
    ),
    "a code that is cut off": (
        annotation(segmentation={"size": [20, 30], "counts": b"`4X"}),
        "1 of 4 masks are mappings without the size and counts of a run-length code",
    ),
    "a code of too few pixels": (
        annotation(segmentation={"size": [20, 30], "counts": [100, 8, 400]}),
        "1 of 4 masks are mappings without the size and counts of a run-length code",
    ),
    "mask elsewhere": (
        annotation(segmentation=[[15, 1, 23, 1, 23, 9]]),
        "1 of 4 masks lie mostly outside their box, and are cut off there. Were they",
    ),
    "mask of a larger image": (
        annotation(segmentation=[[4 * n for n in TRIANGLE]]),
        "1 of 4 masks lie mostly outside their box",
    ),
    "mask as fractions": (
        annotation(bbox=[10, 10, 8, 8], segmentation=[[0.5, 0.5, 0.9, 0.5, 0.9, 0.9]]),
        "1 of 4 masks lie mostly outside their box",
    ),
    "mask elsewhere than corners": (
        annotation(
            bbox=[9, 9, 12, 12],
            bbox_mode=BoxMode.XYXY_ABS,
            segmentation=[[15, 14, 20, 14, 20, 19]],
        ),
        "1 of 4 masks lie mostly outside their box",
    ),
    "code elsewhere": (
        annotation(segmentation=code_of(15, 1, 8, 8)),
        "1 of 4 masks lie mostly outside their box",
    ),
    "list of counts elsewhere": (
        annotation(segmentation=code_of(15, 1, 8, 8, compressed=False)),
        "1 of 4 masks lie mostly outside their box",
    ),
    "mask on a line": (
        annotation(segmentation=[[1, 1, 5, 5, 9, 9, 5, 5], [1, 9, 1, 1, 1, 5]]),
        "1 of 4 masks have no area: their corners lie on one line, or their code is empty",
    ),
    "mask there and back": (
        annotation(segmentation=[[1, 1, 5, 8, 9, 1, 5, 8]]),
        "1 of 4 masks have no area",
    ),
    "empty code": (
        annotation(segmentation=code_of(0, 0, 0, 0)),
        "1 of 4 masks have no area",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_trained_wrongly_is_counted_and_the_first_is_named(name):
    wrong, message = WRONG[name]
    found = [w for w in warnings_of(dicts_of(wrong)) if message in w]
    assert len(found) == 1
    assert "object 0 of b.png" in found[0]
    assert "\n" not in found[0]


WRONG_BOXES = {
    "corners_box": [12, 9, 20, 18],
    "outside_box": [40, 9, 5, 5],
    "fraction_box": [0.1, 0.2, 0.5, 0.5],
    "tiny_box": [9, 9, 1, 1],
    "huge_box": [9, 9, 1e9, 5],
    "nan_box": [NAN, 1, 2, 3],
    "negative_box": [9, 9, -4, 3],
    "empty_box": [9, 9, 0, 3],
    "no_box": [1, 2, 3],
}


@pytest.mark.parametrize("fault", WRONG_BOXES)
def test_it_is_an_error_if_most_boxes_are_wrong(fault):
    wrong = [annotation(bbox=WRONG_BOXES[fault])] * 4
    summary = look_at_annotations(dicts_of(*wrong))
    assert summary.cases[fault].number == 4
    with pytest.raises(DataError, match=r"^4 of 7 ") as e:
        check_boxes(summary)
    assert str(e.value).count(" of b.png, bbox [") == 3  # examples
    assert "\n" not in str(e.value)
    summary = look_at_annotations(dicts_of(*wrong[1:]))
    check_boxes(summary)


@pytest.mark.parametrize(
    ("fault", "mask"),
    [
        ("stray_mask", [[15, 1, 23, 1, 23, 9]]),
        ("flat_mask", [[1, 1, 5, 5, 9, 9]]),
        ("thin_mask", [[1, 1, 2, 2]]),
    ],
)
def test_it_is_an_error_if_most_masks_are_wrong_and_learnt(fault, mask):
    wrong = [annotation(segmentation=mask)] * 4
    summary = look_at_annotations(dicts_of(*wrong))
    assert summary.cases[fault].number == 4
    with pytest.raises(DataError, match=r"^mine: .*4 of 7 "):
        check_masks(cfg_of(), summary, "mine: ")
    check_masks(cfg_of(MASK_ON=False), summary)
    check_masks(cfg_of(), look_at_annotations(dicts_of(*wrong[1:])))


def test_images_with_objects_are_counted_without_those_of_crowds():
    summary = look_at_annotations([*dicts_of(annotation(iscrowd=1)), *dicts_of(annotation())])
    assert (summary.num_images, summary.num_images_with_objects, summary.num_objects) == (4, 3, 7)


@pytest.mark.slow
def test_an_image_with_more_objects_than_can_be_compared_is_refused_in_seconds():
    start = time.process_time()
    summary = look_at_annotations(dicts_of(*[annotation()] * 100_000))
    with pytest.raises(DataError, match=r"the image b\.png has 100,000 objects"):
        check_crowd(summary)
    assert time.process_time() - start < 10
    check_crowd(look_at_annotations(dicts_of(*[annotation()] * 2000)))


def test_boxes_in_an_image_of_unknown_size_may_lie_anywhere():
    dicts = dicts_of(boxed(400, 900, 50, 50))
    for image in dicts:
        del image["height"]
    assert warnings_of(dicts) == []


def test_keypoints_must_be_there_where_they_are_learnt():
    (warning,) = warnings_of(dicts_of(annotation()), cfg_of(KEYPOINT_ON=True))
    assert warning.startswith("MODEL.KEYPOINT_ON is True, but 4 of 4 objects have no keypoints")


def test_what_the_model_does_not_learn_may_be_missing():
    cfg = cfg_of(MASK_ON=False, META_ARCHITECTURE="ProposalNetwork")
    wrong = annotation(segmentation=..., category_id=7)
    assert warnings_of(dicts_of(wrong), cfg) == []


def test_the_number_of_classes_is_compared_with_the_names():
    (warning,) = warnings_of(dicts_of(), names=["ring"])
    assert warning.startswith("MODEL.ROI_HEADS.NUM_CLASSES is 2, but the dataset has 1 classes (r")
    assert warnings_of(dicts_of(), names=None) == []


@pytest.mark.parametrize(
    "polygon",
    [[NAN, *TRIANGLE[1:]], [float("inf"), *TRIANGLE[1:]], [1e9, *TRIANGLE[1:]], ["a"] * 6],
    ids=str,
)
@pytest.mark.parametrize("kind", [list, np.array])
def test_a_polygon_that_would_take_all_memory_is_an_error(polygon, kind):
    summary = look_at_annotations(dicts_of(annotation(segmentation=[kind(polygon)])))
    with pytest.raises(DataError, match=r"1 of 4 objects have a polygon .* object 0 of b\.png"):
        check_masks(cfg_of(), summary)
    check_masks(cfg_of(MASK_ON=False), summary)


def save_truncated(image, file):
    image.save(file)
    file.write_bytes(file.read_bytes()[:-200])


def save_turned(orientation):
    def save(image, file):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(file, exif=exif)

    return save


def save_deep(image, file):
    Image.fromarray(np.full((20, 30), 4000, dtype=np.uint16)).save(file)


@pytest.mark.parametrize(
    ("suffix", "save", "message"),
    [
        ("png", lambda image, file: None, "1 of 2 images do not exist, the first is"),
        ("png", lambda image, file: file.write_bytes(b""), "1 of 2 opened images"),
        ("jpg", lambda image, file: file.write_text("no image"), "cannot be decoded"),
        ("jpg", save_truncated, "cannot be decoded. Training stops when one is loaded"),
        ("png", save_truncated, "cannot be decoded. Training stops when one is loaded"),
        ("jpg", lambda image, file: image.resize((9, 9)).save(file), "another size than"),
        ("jpg", save_turned(6), "another size than their dict says. Detectron2 rotates"),
        ("jpg", save_turned(3), "rotated or mirrored as their EXIF data say"),
        ("png", save_turned(6), "another size than their dict says"),
        ("png", save_deep, "have more than 8 bits in a channel"),
    ],
)
def test_images_are_looked_into(tmp_path, suffix, save, message):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8))
    dicts = dicts_of(annotation())
    for number, entry in enumerate(dicts):
        entry["file_name"] = str(tmp_path / f"{number}.{suffix}")
        (save if number else Image.Image.save)(image, tmp_path / f"{number}.{suffix}")
    (warning,) = warnings_of(dicts)
    assert message in warning
    assert f"1.{suffix}" in warning


def test_names_that_are_no_files_are_left_to_the_mapper():
    assert warnings_of(dicts_of()) == []  # there is no a.png


@pytest.mark.exhaustive
def test_as_many_annotations_as_coco_has_take_ten_seconds_at_most():
    """Of CPU. The annotations are shared objects here, which makes no difference to it."""
    corners = [float(i % 40) for i in range(46)]
    objects = [annotation(segmentation=[copy.copy(corners)], bbox_mode=1) for _ in range(8)]
    image = {"height": 480, "width": 640}
    dicts = [
        {**image, "file_name": f"{i}.jpg", "annotations": objects[: 8 if i % 10 else 1]}
        for i in range(118_000)
    ]
    lines = []
    start = time.process_time()
    summary = look_at_dataset(dicts, lines.append)
    assert time.process_time() - start < 10
    assert summary.num_objects > 860_000
    assert lines[0] == "Checking 861,400 annotations of 118,000 images ..."
    assert lines[1].startswith("Checked 861,400 annotations, and 0 of 118,000 images, in ")
