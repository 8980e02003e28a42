# Copyright (c) the d2_memfit developers.
"""What is put in, and the one line that comes out: of the command, before anything is started.

Dataset dicts that a project registers are in tests/data/test_dataset_check.py.
"""

import json
import os
import resource
import sys

import numpy as np
import pytest
import torch
import train_net
from detectron2.data import DatasetCatalog, MetadataCatalog
from forks import run_forked
from PIL import Image
from tiny import ROOT, run_process, tiny_cfg

from d2_memfit.cli import train

pytestmark = pytest.mark.slow

TRAIN_NET = ROOT / "tools" / "train_net.py"
NAN, INFINITY = float("nan"), float("inf")
SIZE = 24
TRIANGLE = [2.0, 2.0, 20.0, 2.0, 20.0, 20.0]


def good_coco():
    image = {"height": SIZE, "width": SIZE}
    annotation = {"bbox": [2, 2, 18, 18], "area": 162, "iscrowd": 0, "category_id": 1}
    return {
        "images": [{"id": i, "file_name": f"{i}.jpg", **image} for i in (1, 2)],
        "annotations": [
            {"id": i, "image_id": i, "segmentation": [list(TRIANGLE)], **annotation} for i in (1, 2)
        ],
        "categories": [{"id": 1, "name": "ring"}],
    }


def put(place, *path, value=None):
    """What changes one place of a COCO file."""

    def change(coco):
        *parents, last = path
        node = coco[place]
        for key in parents:
            node = node[key]
        node[last] = value

    return change


def drop(place, *path):
    def change(coco):
        node = coco[place]
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]

    return change


def whole(place, value):
    return lambda coco: coco.update({place: value})


def boxes(bbox):
    return lambda coco: [a.update(bbox=bbox) for a in coco["annotations"]]


def code(counts, size=(SIZE, SIZE)):
    return put("annotations", 0, "segmentation", value={"size": list(size), "counts": counts})


def polygon(*corners):
    return put("annotations", 0, "segmentation", value=[list(corners)])


def keypoints(first, second):
    def change(coco):
        coco["annotations"][0]["keypoints"], coco["annotations"][1]["keypoints"] = first, second

    return change


ANNOTATION, IMAGE = ("annotations", 0), ("images", 0)

# What is wrong with the COCO file that is trained on.
COCO = {
    "no images": (whole("images", []), "the list 'images' of {file} has no entries"),
    "images is text": (whole("images", "a"), "the list 'images' of {file} is missing"),
    "images is a mapping": (whole("images", {}), "the list 'images' of {file} is missing"),
    "an image is text": (whole("images", ["a"]), "has an entry without file_name, height, id, wid"),
    "no annotations": (whole("annotations", []), "has no annotations, except of crowds"),
    "annotations is null": (whole("annotations", None), "the list 'annotations' of {file} is miss"),
    "an annotation is null": (whole("annotations", [None]), "has an entry without bbox, category"),
    "no categories": (whole("categories", []), "has the category_id 1, but nothing has that id"),
    "categories is null": (whole("categories", None), "the list 'categories' of {file} is missing"),
    "a category has no name": (drop("categories", 0, "name"), "has an entry without name"),
    "a category has no id": (drop("categories", 0, "id"), "has an entry without id"),
    "image without a name": (drop(*IMAGE, "file_name"), "has an entry without file_name"),
    "image without a height": (drop(*IMAGE, "height"), "has an entry without height"),
    "height of text": (
        put(*IMAGE, "height", value="24"),
        "has the height '24' with the id 1",
    ),
    "height 0": (put(*IMAGE, "height", value=0), "has the height 0 with the id 1, which is"),
    "negative width": (
        put(*IMAGE, "width", value=-24),
        "has the width -24 with the id 1, which is not a number",
    ),
    "width NaN": (put(*IMAGE, "width", value=NAN), "width nan with the id 1, which is not a numb"),
    "infinite height": (put(*IMAGE, "height", value=INFINITY), "has the height inf with the id 1"),
    "height of another file": (put(*IMAGE, "height", value=99), "its entry says (24, 99)"),
    "height of a billion": (put(*IMAGE, "height", value=10**9), "its entry says (24, 1000000000)"),
    "file_name of a number": (put(*IMAGE, "file_name", value=7), "has the file_name 7 with the id"),
    "image is not there": (put(*IMAGE, "file_name", value="x.jpg"), "1 of 2 images do not exist"),
    "file_name of a folder": (
        put(*IMAGE, "file_name", value="folder"),
        "{folder}/folder cannot be r",
    ),
    "file_name of a parent": (put(*IMAGE, "file_name", value="../a/b.jpg"), "../a/b.jpg"),
    "image id is a list": (put(*IMAGE, "id", value=[1]), "the id [1], which is not an integer or"),
    "image id is null": (put(*IMAGE, "id", value=None), "the id None, which is not an integer or"),
    "image id is true": (put(*IMAGE, "id", value=True), "the id True, which is not an integer or"),
    "image id is 1.5": (put(*IMAGE, "id", value=1.5), "has the id 1.5, which is not an integer"),
    "image id is 0.0": (put(*IMAGE, "id", value=0.0), "has the id 0.0, which is not an integer"),
    "image_id is 1.0": (put(*ANNOTATION, "image_id", value=1.0), "has the image_id 1.0, which is"),
    "image id of 400 digits": (
        put(*IMAGE, "id", value=10**400),
        "has the image_id 1, but nothing has",
    ),
    "height of 24.5": (put(*IMAGE, "height", value=24.5), "its entry says (24, 24.5)"),
    "line break in a name": (put(*IMAGE, "file_name", value="a\nb.jpg"), "is {folder}/a\\nb.jpg"),
    "zero byte in a name": (put(*IMAGE, "file_name", value="a\0b.jpg"), "1 of 2 images do not ex"),
    "half a character": (put(*IMAGE, "file_name", value="a\udc80.jpg"), "{folder}/a\\udc80.jpg"),
    "an empty name": (put(*IMAGE, "file_name", value=""), "1 of 2 images do not exist, the first"),
    "file_name is null": (put(*IMAGE, "file_name", value=None), "has the file_name None with the"),
    "file_name is a list": (put(*IMAGE, "file_name", value=["1.jpg"]), "has the file_name ['1.jp"),
    "file_name of another folder": (
        put(*IMAGE, "file_name", value="/etc/passwd"),
        "opened images cannot be decoded. Training stops when one is loaded: /etc/passwd (Unid",
    ),
    "file_name is an address": (
        put(*IMAGE, "file_name", value="http://127.0.0.1:9/a.jpg"),
        "1 of 2 images do not exist, the first is {folder}/http://127.0.0.1:9/a.jpg",
    ),
    "category name of a number": (
        put("categories", 0, "name", value=7),
        "the list 'categories' of {file} has the name 7 with the id 1, which is not a text",
    ),
    "category name null": (put("categories", 0, "name", value=None), "has the name None with the"),
    "category name a list": (put("categories", 0, "name", value=["a"]), "has the name ['a'] with"),
    "names of keypoints in a text": (
        put("categories", 0, "keypoints", value="abc"),
        "has the keypoints 'abc' with the id 1, which is not a list of names",
    ),
    "a number of keypoints": (put("categories", 0, "keypoints", value=7), "has the keypoints 7 wi"),
    "numbers as names of keypoints": (
        put("categories", 0, "keypoints", value=[1, 2]),
        "has the keypoints [1, 2] with the id 1, which is not a list of names",
    ),
    "text in unused keypoints": (
        keypoints(["a", "b", 2], [1, 2, 2]),
        "has the keypoints ['a', 'b', 2] with the id 1, which is not a list of numbers",
    ),
    "keypoints are a text": (keypoints("abc", "abc"), "has the keypoints 'abc' with the id 1, whi"),
    "keypoints are a number": (keypoints(7, 7), "has the keypoints 7 with the id 1, which is not"),
    "keypoints are null": (keypoints([None] * 3, [1, 2, 2]), "has the keypoints [None, None, None"),
    "keypoints with NaN": (keypoints([NAN, 1, 2], [1, 2, 2]), "has the keypoints [nan, 1, 2] with"),
    "iscrowd of text": (put(*ANNOTATION, "iscrowd", value="no"), "has the iscrowd 'no' with the i"),
    "iscrowd of the text 0": (put(*ANNOTATION, "iscrowd", value="0"), "has the iscrowd '0' with t"),
    "iscrowd 2": (put(*ANNOTATION, "iscrowd", value=2), "has the iscrowd 2 with the id 1, which i"),
    "iscrowd null": (put(*ANNOTATION, "iscrowd", value=None), "has the iscrowd None with the id 1"),
    "iscrowd is a list": (put(*ANNOTATION, "iscrowd", value=[0]), "has the iscrowd [0] with the i"),
    "true as mask": (
        put(*ANNOTATION, "segmentation", value=True),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "true in a bbox": (put(*ANNOTATION, "bbox", value=[True, 2, 3, 4]), "has the bbox [True, 2, 3"),
    "bbox of 1e308": (put(*ANNOTATION, "bbox", value=[1e308] * 4), "has the bbox [1e+308, 1e+308,"),
    "bbox of 400 digits": (put(*ANNOTATION, "bbox", value=[10**400, 1, 1, 1]), "has the bbox [100"),
    "image id of text": (put(*IMAGE, "id", value="1"), "has numbers and texts as id: use one ty"),
    "image id twice": (
        put(*IMAGE, "id", value=2),
        "'images' of {file} has the id 2 more than once",
    ),
    "annotation id twice": (
        put(*ANNOTATION, "id", value=2),
        "'annotations' of {file} has the id 2",
    ),
    "category id twice": (
        lambda coco: coco["categories"].append({"id": 1, "name": "coin"}),
        "'categories' of {file} has the id 1 more than once",
    ),
    "category_id is a list": (put(*ANNOTATION, "category_id", value=[1]), "the category_id [1], w"),
    "category_id of none": (
        put(*ANNOTATION, "category_id", value=7),
        "has the category_id 7, but nothing has",
    ),
    "category_id -1": (
        put(*ANNOTATION, "category_id", value=-1),
        "has the category_id -1, but nothing has",
    ),
    "category_id of text": (put(*ANNOTATION, "category_id", value="1"), "texts as category_id"),
    "image_id of none": (
        put(*ANNOTATION, "image_id", value=7),
        "has the image_id 7, but nothing has",
    ),
    "image_id is a mapping": (
        put(*ANNOTATION, "image_id", value={}),
        "the image_id {{}}, which is",
    ),
    "no bbox": (drop(*ANNOTATION, "bbox"), "has an entry without bbox: "),
    "bbox null": (
        put(*ANNOTATION, "bbox", value=None),
        "has the bbox None with the id 1, which is",
    ),
    "bbox of three": (put(*ANNOTATION, "bbox", value=[1, 2, 3]), "has the bbox [1, 2, 3] with the"),
    "bbox of text": (
        put(*ANNOTATION, "bbox", value="1 2 3 4"),
        "has the bbox '1 2 3 4' with the i",
    ),
    "bbox of texts": (
        put(*ANNOTATION, "bbox", value=["1"] * 4),
        "has the bbox ['1', '1', '1', '1'",
    ),
    "bbox with NaN": (
        put(*ANNOTATION, "bbox", value=[1, 2, 3, NAN]),
        "has the bbox [1, 2, 3, nan]",
    ),
    "infinite bbox": (
        put(*ANNOTATION, "bbox", value=[1, 2, INFINITY, 3]),
        "has the bbox [1, 2, inf",
    ),
    "nested bbox": (put(*ANNOTATION, "bbox", value=[[1, 2, 3, 4]]), "has the bbox [[1, 2, 3, 4]]"),
    "no box has a size": (boxes([1, 1, 0, 0]), "bad, {file}: 2 of 2 boxes have no area. Detec"),
    "all boxes are negative": (boxes([9, 9, -4, -4]), "2 of 2 boxes have a negative width or he"),
    "boxes are corners": (boxes([10, 9, 20, 21]), "2 of 2 boxes exceed their image, but would fit"),
    "boxes are fractions": (boxes([0.1, 0.1, 0.5, 0.4]), "2 of 2 boxes have numbers from 0 to 1"),
    "boxes of YOLO": (boxes([0.5, 0.5, 1, 1]), "2 of 2 boxes have numbers from 0 to 1, but the"),
    "boxes of a larger image": (boxes([90, 80, 70, 60]), "2 of 2 boxes exceed their image. Detect"),
    "boxes before their image": (boxes([-20, 2, 19, 9]), "2 of 2 boxes exceed their image. Detec"),
    "boxes of a smaller image": (boxes([5, 5, 1.5, 1.5]), "2 of 2 boxes are smaller than 2 pixels"),
    "boxes of a billion": (boxes([2, 2, 1e9, 9]), "2 of 2 boxes are larger than a million pixel"),
    "boxes at a billion": (boxes([1e9, 2, 9, 9]), "2 of 2 boxes are larger than a million pixel"),
    "boxes of 1e-30": (boxes([2, 2, 1e-30, 9]), "2 of 2 boxes have no area. Detectron2's mapper"),
    "crowds only": (
        lambda coco: [a.update(iscrowd=1) for a in coco["annotations"]],
        "has no annotations, except of crowds, which are not trained on",
    ),
    "no mask": (
        drop(*ANNOTATION, "segmentation"),
        "bad, {file}: MODEL.MASK_ON is True, but 1 of 2 objects have no mask",
    ),
    "mask null": (
        put(*ANNOTATION, "segmentation", value=None),
        "bad, {file}: MODEL.MASK_ON is True, but 1 of 2 objects have no mask",
    ),
    "polygon with NaN": (
        polygon(NAN, *TRIANGLE[1:]),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "infinite polygon": (
        polygon(INFINITY, *TRIANGLE[1:]),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "polygon far away": (
        polygon(1e9, *TRIANGLE[1:]),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "polygon of texts": (
        polygon(*"123456"),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "polygon of pairs": (
        polygon(*[[1, 2]] * 6),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "odd polygon": (
        polygon(*TRIANGLE, 1),
        "bad, {file}: 1 of 2 masks have a polygon with an odd number of coord",
    ),
    "masks away from their boxes": (
        lambda coco: [a.update(bbox=[1, 12, 8, 8]) for a in coco["annotations"]],
        "bad, {file}: 2 of 2 masks lie mostly outside their box",
    ),
    "masks as fractions": (
        lambda coco: [
            a.update(bbox=[10, 10, 12, 12], segmentation=[[n / SIZE for n in TRIANGLE]])
            for a in coco["annotations"]
        ],
        "bad, {file}: 2 of 2 masks lie mostly outside their box",
    ),
    "masks on a line": (
        lambda coco: [a.update(segmentation=[[2, 2, 9, 9, 20, 20]]) for a in coco["annotations"]],
        "bad, {file}: 2 of 2 masks have no area: their corners lie on one line",
    ),
    "masks there and back": (
        lambda coco: [
            a.update(segmentation=[[2, 2, 9, 3, 20, 20, 9, 3]]) for a in coco["annotations"]
        ],
        "bad, {file}: 2 of 2 masks have no area: their corners lie on one line",
    ),
    "polygon of 400 digits": (
        polygon(10**400, *TRIANGLE[1:]),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "code that is cut off": (
        code("`4X"),
        "bad, {file}: 1 of 2 masks are mappings without the size and counts",
    ),
    "code of no text": (
        code(""),
        "bad, {file}: 1 of 2 masks are mappings without the size and counts",
    ),
    "a number as mask": (
        put(*ANNOTATION, "segmentation", value=7),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "text as mask": (
        put(*ANNOTATION, "segmentation", value="abc"),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
    "code without counts": (
        code(None),
        "bad, {file}: 1 of 2 masks are mappings without the size and counts",
    ),
    "negative counts": (
        code([-5, 581]),
        "bad, {file}: 1 of 2 masks are mappings without the size and counts",
    ),
    "counts of too few": (
        code([3, 4]),
        "bad, {file}: 1 of 2 masks are mappings without the size and counts",
    ),
    "code of no size": (
        code([576], []),
        "bad, {file}: 1 of 2 masks are mappings without the size and counts",
    ),
    "code of other size": (
        code([1], [1, 1]),
        "bad, {file}: 1 of 2 masks are run-length codes of another size",
    ),
    "code of huge size": (
        code([10**12], [10**6] * 2),
        "bad, {file}: 1 of 2 masks are run-length codes of another size",
    ),
    "code for polygons": (
        code([576]),
        "bad, {file}: INPUT.MASK_FORMAT is polygon, but 1 of 2 masks are run-",
    ),
}

# What the file is, in place of one in COCO's format.
CONTENTS = {
    "empty": (b"", "is not valid JSON"),
    "cut off": (b'{"images": [', "is not valid JSON"),
    "binary": (bytes(range(128, 256)), "is not valid JSON"),
    "of UTF-16": ('{"images": []}'.encode("utf-16"), "is not valid JSON"),
    "with a BOM": (b"\xef\xbb\xbf{}", "is not valid JSON"),
    "nested without end": (b"[" * 200_000, "is not valid JSON"),
    "a list": (b"[]", "is not in COCO's format: it has no 'images'"),
    "a number": (b"7", "is not in COCO's format: it has no 'images'"),
    "null": (b"null", "is not in COCO's format: it has no 'images'"),
    "a mapping of nothing": (b"{}", "the list 'images' of {file} is missing"),
    "a number too long": (b'{"images": ' + b"9" * 5000 + b"}", "is not valid JSON"),
}


def save_turned(image, file):
    exif = Image.Exif()
    exif[0x0112] = 6
    image.resize((SIZE * 2, SIZE)).save(file, exif=exif)


IMAGES = {
    "empty": (lambda image, file: file.write_bytes(b""), "1.jpg (UnidentifiedImageError: "),
    "text": (lambda image, file: file.write_text("no image"), "1.jpg (UnidentifiedImageError: "),
    "a folder": (lambda image, file: file.mkdir(), "1.jpg cannot be read (it is not a file)"),
    "truncated": (
        lambda image, file: [image.save(file), file.write_bytes(file.read_bytes()[:-300])],
        "1.jpg (OSError: image file is truncated",
    ),
    "of another size": (
        lambda image, file: image.resize((9, 9)).save(file),
        "1.jpg has (9, 9) pixels of width and height, but its entry says (24, 24)",
    ),
    "on its side": (
        save_turned,
        "1.jpg has (24, 48) pixels of width and height, but its entry says",
    ),
    "a pipe": (lambda image, file: os.mkfifo(file), "1.jpg cannot be read (it is not a file)"),
    "a link to itself": (
        lambda image, file: file.symlink_to(file),
        "1.jpg cannot be read (Too many levels of symbolic links)",
    ),
    "missing": (
        lambda image, file: None,
        "1 of 2 images do not exist, the first is {folder}/1.jpg",
    ),
}

# Keys and options, and what is said of them.
OPTIONS = {
    "--hold-out 0": "--hold-out 0 of 2 images leaves a part without images: name a share between",
    "--hold-out 0.4": "--hold-out 0.4 of 2 images leaves a part without images: name a share betwe",
    "--hold-out 1": "--hold-out 1 of 2 images leaves a part without images: name a share between",
    "--hold-out 0.5 --coco other {file} {folder}": "divides one dataset, but there are 2 --coco",
    "SOLVER.MAX_ITER 0": "SOLVER.MAX_ITER must be a positive integer up to 1000000000, got 0",
    "SOLVER.MAX_ITER -3": "SOLVER.MAX_ITER must be a positive integer up to 1000000000, got -3",
    "SOLVER.MAX_ITER many": "SOLVER.MAX_ITER must be of type int, got many",
    "SOLVER.IMS_PER_BATCH 0": "IMS_PER_BATCH must be a positive integer up to 1000000, got 0",
    "SOLVER.ACCUMULATION_STEPS 0": "must be a positive integer up to 1000000, got 0",
    "SOLVER.STEPS 20": "SOLVER.STEPS must be of type tuple, got 20",
    "SOLVER.MAX_ITER 99999999999": "integer up to 1000000000, got 99999999999",
    "SOLVER.IMS_PER_BATCH 99999999999": "integer up to 1000000, got 99999999999",
    "MODEL.PIXEL_STD [1e999,1.0,1.0]": "MODEL.PIXEL_STD must be a finite number, got inf",
    "SOLVER.BASE_LR high": "SOLVER.BASE_LR must be of type float, got high",
    "SOLVER.REFERENCE_WORLD_SIZE 3": "must be divisible by SOLVER.REFERENCE_WORLD_SIZE, 3, got 2",
    "SOLVER.NO_SUCH 1": "there is no config key SOLVER.NO_SUCH",
    "SOLVER.MAX_ITR 9": "there is no config key SOLVER.MAX_ITR (did you mean SOLVER.MAX_ITER",
    "SOLVER.MAX_ITER=5": "SOLVER.MAX_ITER=5: write it with a space, SOLVER.MAX_ITER 5",
    "SOLVER.MAX_ITER=5 SOLVER.STEPS=(3,)": "SOLVER.MAX_ITER=5: write it with a space, SOLVER.MAX_I",
    "SOLVER.MAX_ITER= 5": "SOLVER.MAX_ITER=: write it with a space, SOLVER.MAX_ITER VALUE",
    "SOLVER.MAX_ITER: 5": "there is no config key SOLVER.MAX_ITER: (did you mean SOLVER.MAX_ITER",
    "SOLVER.MAX_ITER.X 3": "no config key SOLVER.MAX_ITER.X (did you mean SOLVER.MAX_ITER",
    "solver.max_iter 3": "there is no config key solver.max_iter",
    "__class__ 3": "there is no config key __class__",
    ". 3": "there is no config key .",
    "SOLVER.MAX_ITER __import__('os').getpid()": "SOLVER.MAX_ITER must be of type int, got __impor",
    "SOLVER.MAX_ITER 1e9": "SOLVER.MAX_ITER must be of type int, got 1e9",
    "SOLVER.BASE_LR nan": "SOLVER.BASE_LR must be of type float, got nan",
    "SOLVER.BASE_LR 1e999": "SOLVER.BASE_LR must be a finite number, got inf",
    "SOLVER 1": "SOLVER must be of type CfgNode",
    "SOLVER.MAX_ITER": "a value is missing after SOLVER.MAX_ITER",
    "DATALOADER.NUM_WORKERS -1": "DATALOADER.NUM_WORKERS must be an integer of at least 0, got -1",
    "DATASETS.TRAIN ()": "DATASETS.TRAIN is empty: name a dataset to train on",
    "DATASETS.TRAIN ('bda',)": "DATASETS.TRAIN names 'bda', but there is no such dataset",
    "DATASETS.TRAIN bad": "DATASETS.TRAIN must be of type tuple, got bad",
    "DATASETS.TEST ('bda',)": "DATASETS.TEST names 'bda', but there is no such dataset",
    "INPUT.MIN_SIZE_TRAIN ()": "INPUT.MIN_SIZE_TRAIN must be one or more sizes in pixels",
    "INPUT.MIN_SIZE_TRAIN (-8,)": "sizes in pixels, each an integer of at least 0, got (-8,)",
    "INPUT.MIN_SIZE_TEST -8": "sizes in pixels, each an integer of at least 0, got -8",
    "INPUT.MAX_SIZE_TRAIN 0": "INPUT.MAX_SIZE_TRAIN must be a positive integer, got 0",
    "MODEL.META_ARCHITECTURE RCNN": "(KeyError(\"No object named 'RCNN' found in 'META_ARCH'",
    "MODEL.BACKBONE.NAME resnet": "(KeyError(\"No object named 'resnet' found in 'BACKBONE' reg",
    "MODEL.RESNETS.DEPTH 51": "the model cannot be built from this config (KeyError(51), in",
    "MODEL.PROPOSAL_GENERATOR.NAME RPM": "(KeyError(\"No object named 'RPM' found in 'PROPOSAL",
    "MODEL.RPN.HEAD_NAME Head": "(KeyError(\"No object named 'Head' found in 'RPN_HEAD' registry!",
    "MODEL.ROI_HEADS.NAME Heads": "(KeyError(\"No object named 'Heads' found in 'ROI_HEADS' regist",
    "MODEL.ROI_HEADS.NUM_CLASSES 0": "MODEL.ROI_HEADS.NUM_CLASSES 0 does not fit the data: {file}",
    "MODEL.ROI_HEADS.NUM_CLASSES 80": "MODEL.ROI_HEADS.NUM_CLASSES 80 does not fit the data: ",
    "MODEL.ROI_BOX_HEAD.NAME Head": "(KeyError(\"No object named 'Head' found in 'ROI_BOX_HEAD' re",
    "MODEL.ROI_MASK_HEAD.NAME Head": "(KeyError(\"No object named 'Head' found in 'ROI_MASK_HEAD'",
    "MODEL.KEYPOINT_ON True": "{file}: MODEL.KEYPOINT_ON is True, but 2 of 2 objects have no keyp",
    "MODEL.META_ARCHITECTURE RetinaNet": "cannot be built from this config (KeyError('p7'), in",
    "MODEL.ROI_HEADS.IN_FEATURES ['p9']": "cannot be built from this config (KeyError('p9'), in",
    "MODEL.RPN.IN_FEATURES ['p9']": "cannot be built from this config (KeyError('p9'), in",
    "MODEL.FPN.IN_FEATURES ['res9']": "cannot be built from this config (KeyError('res9'), in",
    "MODEL.RESNETS.OUT_FEATURES ['res9']": "from this config (AssertionError('Available childre",
    "MODEL.RESNETS.NORM XX": "cannot be built from this config (KeyError('XX'), in",
    "MODEL.FPN.NORM XX": "cannot be built from this config (KeyError('XX'), in",
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE XX": "from this config (ValueError('Unknown pooler type: XX'),",
    "MODEL.ANCHOR_GENERATOR.NAME XX": "(KeyError(\"No object named 'XX' found in 'ANCHOR_GENERAT",
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS [[0.0]]": "(ZeroDivisionError('float division by zero'),",
    "MODEL.RPN.IOU_THRESHOLDS [0.7,0.3]": "cannot be built from this config (AssertionError(), in",
    "MODEL.DEVICE tpu9": "MODEL.DEVICE 'tpu9' is not a device of PyTorch",
    "MODEL.WEIGHTS no/such.pth": "the checkpoint no/such.pth cannot be read (No such ",
    "MODEL.WEIGHTS http://127.0.0.1:9/w.pkl": "the weights http://127.0.0.1:9/w.pkl cannot be down",
    "MODEL.WEIGHTS no://such/w.pkl": "the weights no://such/w.pkl cannot be downloaded",
    "OUTPUT_DIR {folder}/text.txt": "{folder}/text.txt is not a folder that you may write to",
    "MODEL.WEIGHTS {folder}": "the checkpoint {folder} cannot be read (it is not a file)",
    "OUTPUT_DIR {folder}/text.txt/a": "cannot be written: {folder}/text.txt is not a folder that",
    "OUTPUT_DIR /dev/null/a": "/dev/null/a/config.yaml cannot be written: /dev/null is not",
    "OUTPUT_DIR ''": "OUTPUT_DIR is empty: name a folder",
    "--num-gpus -1": "--num-gpus must be an integer of at least 0, got -1",
    "--num-gpus 3": "SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, 3, got 2",
    "--num-machines 0": "--num-machines must be a positive integer, got 0",
    "--num-machines 2 --machine-rank 2": "--machine-rank must be 0 to 1, because there are --num-",
    "--machine-rank -1": "rank must be 0 to 0, because there are --num-machines 1, got -1",
    "--card 7GB": "--card: '7GB' is not known",
    "--config-file no/such.yaml": "--config-file 'no/such.yaml' does not exist",
    "--config-file {folder}/text.txt": "not a config: it must be a mapping of keys to values",
    "--config-file {folder}/itself.yaml": "itself.yaml: its _BASE_ leads back to itself",
    "--config-file {folder}/no_base.yaml": "no_base.yaml: [Errno 2] No such file or directory: '",
    "--config-file {folder}/tower.yaml": "tower.yaml: only arithmetic is computed in a config, not",
    "--config-file {folder}/zero.yaml": "(float division by zero)",
    "--config-file {folder}/half.yaml": "only arithmetic is computed in a config, not '1 if'",
    "--config-file {folder}/list.yaml": "only arithmetic is computed in a config, not '[0] * 10**9",
    "--config-file {folder}/shift.yaml": "('1 << 10 ** 10' is not arithmetic)",
    "--config-file {folder}/unsafe.yaml": "unsafe.yaml: ",
    "--config-file {folder}/binary.yaml": "binary.yaml: ",
    "--config-file {folder}/key.yaml": "key.yaml: there is no config key NO_SUCH_KEY",
    "--coco other no/such.json no": "dataset other: no/such.json cannot be read (No such",
    "--coco other {folder} no": "dataset other: {folder} cannot be read (it is not a f",
    "--coco bad {file} {folder}": "--coco 'bad' is given twice or not printable: use another",
}

FILES = {
    "text.txt": "no config, and no weights",
    "itself.yaml": "_BASE_: itself.yaml\n",
    "no_base.yaml": "_BASE_: no_such.yaml\n",
    "unsafe.yaml": "SEED: !!python/object/apply:os.getpid []\n",
    "binary.yaml": "\x00\x01",
    "key.yaml": "NO_SUCH_KEY: 1\n",
}
ARITHMETIC = {
    "tower.yaml": "2**2**2**2**2**2",
    "zero.yaml": "1/0",
    "half.yaml": "1 if",
    "list.yaml": "[0] * 10**9",
    "shift.yaml": "1 << 10**10",
}
FILES |= {
    name: f'SEED: !!python/object/apply:eval ["{text}"]\n' for name, text in ARITHMETIC.items()
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file, and a folder with two good images, which the tests leave as it is."""
    folder = tmp_path_factory.mktemp("bad_input")
    cfg = tiny_cfg("mask_rcnn")
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 5
    (folder / "tiny.yaml").write_text(cfg.dump())
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "folder").mkdir()
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))
    for i in (1, 2):
        image.save(folder / f"{i}.jpg")
    return folder


@pytest.fixture
def said(config, tmp_path, capsys, monkeypatch):
    """Calls the command with changed files, and gives the one line that it says."""

    def call(change=lambda coco: None, content=None, folder=config, options="", starts=False):
        if not starts:
            monkeypatch.setattr(train, "launch", None)
        coco = good_coco()
        change(coco)
        file = tmp_path / "bad.json"
        file.write_bytes(json.dumps(coco).encode() if content is None else content)
        names = {"file": str(file), "folder": str(folder)}
        options = [o.format(**names) for o in options.split(" ") if o]
        keys = [] if options[:1] and options[0].startswith("--") else options
        flags = [] if keys else options
        flags = (
            flags if "--config-file" in flags else ["--config-file", f"{config}/tiny.yaml", *flags]
        )
        output = [] if "OUTPUT_DIR" in keys else ["OUTPUT_DIR", str(tmp_path / "output")]
        coco_option = ["--coco", "bad", str(file), str(folder)]
        if "other" in flags:
            output += ["DATASETS.TRAIN", "('other',)"]
        argv = ["train_net.py", *flags, *coco_option, *output, *keys]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            with pytest.raises(SystemExit) as e:
                train_net.run()
        finally:
            for name in {"bad", "other"} & set(DatasetCatalog.list()):
                DatasetCatalog.remove(name)
                MetadataCatalog.remove(name)
        assert e.value.code == 2
        assert not (tmp_path / "output").exists()
        line = capsys.readouterr().err
        if "://" in " ".join(options):  # a download shows its progress first
            line = line[line.index("error: ") :]
        assert line.startswith("error: ")
        assert line.count("\n") == 1
        assert len(line) < 1000
        return line, names

    return call


@pytest.mark.parametrize("area", ["162", None, NAN, [1]])
def test_an_area_that_pycocotools_cannot_compare(said, area):
    line, names = said(put(*ANNOTATION, "area", value=area), options="DATASETS.TEST ('bad',)")
    assert f"bad cannot be evaluated: 1 annotations in {names['file']} have no area" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_asked_for_and_not_there(said, device):
    line, _ = said(options=f"MODEL.DEVICE {device}")
    assert f"MODEL.DEVICE {device}: PyTorch sees 0 devices of this kind" in line


@pytest.mark.parametrize("name", COCO)
def test_a_coco_file(said, name):
    change, message = COCO[name]
    line, names = said(change)
    assert message.format(**names) in line


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_another(said, name):
    content, message = CONTENTS[name]
    line, names = said(content=content)
    assert message.format(**names) in line
    assert names["file"] in line


@pytest.mark.parametrize("name", IMAGES)
def test_an_image(said, tmp_path, config, name):
    save, message = IMAGES[name]
    folder = tmp_path / "images"
    folder.mkdir()
    image = Image.open(config / "1.jpg")
    image.save(folder / "2.jpg")
    save(image, folder / "1.jpg")
    line, names = said(folder=folder)
    assert message.format(**names) in line


@pytest.mark.parametrize("options", OPTIONS)
def test_an_option(said, options):
    line, names = said(options=options)
    assert OPTIONS[options].format(**names) in line


# A trainer of a project, with a dataset that it registers; what is wrong comes first.
SCRIPT = """
import sys
from detectron2.data import DatasetCatalog
from d2_memfit import MemfitTrainer
from d2_memfit.config.load import load_cfg
from d2_memfit.errors import exit_on_error

image = {{"file_name": "{folder}/1.jpg", "image_id": 1, "height": 24, "width": 24}}
polygon = [2.0, 2.0, 20.0, 2.0, 20.0, 20.0]
annotation = {{"bbox": [2, 2, 18, 18], "bbox_mode": 1, "category_id": 0, "segmentation": [polygon]}}
{change}
dicts = [{{**image, "annotations": [annotation]}}]
DatasetCatalog.register("mine", lambda: dicts)
opts = ["DATASETS.TRAIN", ("mine",), "OUTPUT_DIR", "{output}", "SOLVER.MAX_ITER", 3]
opts += ["DATASETS.TEST", ()]

@exit_on_error
def main():
    MemfitTrainer(load_cfg("{folder}/tiny.yaml", opts)).train()

main()
"""


# A mistake costs the process its life, and not the machine its RAM.
ADDRESS_SPACE = (resource.RLIMIT_AS, 16 * 2**30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "polygon[0] = float('nan')",
            "error: 1 of 1 objects have a polygon with a corner that is N",
        ),
        (
            "image['file_name'] = '{folder}/text.txt'",
            "error: the image {folder}/text.txt cannot be",
        ),
    ],
)
def test_a_project_with_a_registered_dataset(config, tmp_path, change, message):
    places = {"folder": config, "output": tmp_path / "output"}
    script = SCRIPT.format(change=change.format(**places), **places)
    run = run_forked("-c", script, limits=[ADDRESS_SPACE])
    assert run.returncode == 2, run.stdout[-2000:] + run.stderr[-2000:]
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(message.format(**places))
    assert "Traceback" not in run.stderr


def test_the_command_as_a_process(config, tmp_path):
    coco = good_coco()
    polygon(NAN, *TRIANGLE[1:])(coco)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(coco))
    arguments = ["--config-file", config / "tiny.yaml", "--coco", "bad", file, config]
    arguments += ["OUTPUT_DIR", tmp_path / "output"]
    run = run_forked(TRAIN_NET, *arguments, limits=[ADDRESS_SPACE])
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: bad, {file}: 1 of 2 objects have a polygon with a corner")
    assert run.stderr.count("\n") == 1


def fill_the_disk():
    """Each file can have 100 bytes: Python gets an error in writing as from a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def test_a_disk_that_is_full_at_the_start(config, tmp_path):
    file = tmp_path / "good.json"
    file.write_text(json.dumps(good_coco()))
    command = [sys.executable, "-W", "ignore", TRAIN_NET]
    command += ["--config-file", config / "tiny.yaml", "--coco", "good", file, config]
    run = run_process([*command, "OUTPUT_DIR", tmp_path / "output"], preexec_fn=fill_the_disk)
    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: OUTPUT_DIR {tmp_path}/output cannot be written (File too large)"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("options", [[], ["--eval-only"]])
def test_a_full_disk_at_the_start_leaves_the_config_of_an_earlier_run(config, tmp_path, options):
    file = tmp_path / "good.json"
    file.write_text(json.dumps(good_coco()))
    output = tmp_path / "output"
    output.mkdir()
    earlier = (config / "tiny.yaml").read_text()
    (output / "config.yaml").write_text(earlier)
    arguments = [*options, "--config-file", output / "config.yaml", "--coco", "good", file, config]
    limits = [(resource.RLIMIT_FSIZE, 3000)]
    run = run_forked(TRAIN_NET, *arguments, "OUTPUT_DIR", output, limits=limits)
    assert run.returncode == 2, run.stderr
    assert f"error: OUTPUT_DIR {output} cannot be written (File too large)" in run.stderr
    assert (output / "config.yaml").read_text() == earlier
    assert set(os.listdir(output)) <= {"config.yaml", "log.txt"}


def test_a_name_that_is_not_of_utf_8(config, tmp_path):
    file = os.fsencode(tmp_path / "bad") + b"\xff.json"
    arguments = ["--config-file", config / "tiny.yaml", "--coco", "bad", file, config]
    run = run_forked(TRAIN_NET, *arguments)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert r"bad\udcff.json cannot be read (No such file or directory)" in run.stderr
