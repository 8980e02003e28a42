# Copyright (c) the d2_memfit developers.
"""A small dataset of ellipses, with every kind of annotation that the projects read."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, Optional

import cv2
import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets.coco import convert_to_coco_json
from detectron2.structures import BoxMode
from pycocotools import mask as coco_mask

__all__ = ["CLASSES", "STUFF", "register_dataset"]

CLASSES = ("person", "coin", "plate")
STUFF = ("floor", "wall")
_NUM_IMAGES = 12
_NUM_POINTS = 12  # of DensePose, on each instance


def register_dataset(name: str, kind: str, folder: Path) -> None:
    """Make the images and register them in Detectron2's catalogs.

    Args:
        name: name in the catalogs.
        kind: "instances", "sem_seg", "panoptic" or "densepose": its annotations.
        folder: folder of images, PNGs of segments and a COCO file, which are always the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # DeepLab's pooling needs its training size, or a multiple of it.
    size = (192, 192) if kind in ("sem_seg", "panoptic") else None
    dicts = [_make_image(folder, i, size) for i in range(_NUM_IMAGES)]
    things: dict[str, Any] = {
        "thing_classes": list(CLASSES),
        "thing_dataset_id_to_contiguous_id": {i + 1: i for i in range(len(CLASSES))},
    }
    of_coco = f"{name}_coco"
    DatasetCatalog.register(of_coco, partial(_dicts_of_kind, dicts, "instances"))
    MetadataCatalog.get(of_coco).set(**things)
    convert_to_coco_json(of_coco, str(folder / "coco.json"))
    DatasetCatalog.register(name, partial(_dicts_of_kind, dicts, kind))
    if kind == "densepose":  # its loader makes the other class names
        transforms = folder / "densepose_transforms.mat"
        _write_densepose_transforms(transforms)
        things = {"categories": {0: "person"}, "densepose_transform_src": str(transforms)}
    metadata = MetadataCatalog.get(name)
    metadata.set(**things)
    metadata.set(
        stuff_classes=[*CLASSES, *STUFF],
        stuff_dataset_id_to_contiguous_id={i + 1: i for i in range(len(CLASSES + STUFF))},
        ignore_label=255,
        label_divisor=1000,
        json_file=str(folder / "coco.json"),
        image_root=str(folder),
        evaluator_type="sem_seg" if kind == "sem_seg" else "coco",
    )


def _dicts_of_kind(dicts: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    keys = {
        "sem_seg": {"sem_seg_file_name"},
        "panoptic": {"annotations", "pan_seg_file_name", "segments_info"},
    }.get(kind, {"annotations"})
    unwanted = {"annotations", "sem_seg_file_name", "pan_seg_file_name", "segments_info"} - keys
    result = [{k: v for k, v in d.items() if k not in unwanted} for d in dicts]
    if kind == "densepose":
        for d in result:
            people = [a for a in d["annotations"] if a["category_id"] == 0]
            d["annotations"] = [{**a, **_densepose(a, d)} for a in people]
    return copy.deepcopy(result)  # some loaders change what they get


def _make_image(folder: Path, index: int, size: Optional[tuple[int, int]]) -> dict[str, Any]:
    random = np.random.RandomState(index)
    height, width = size or random.randint(140, 220, size=2).tolist()
    image = random.randint(0, 255, (height, width, 3)).astype(np.uint8)
    segments = np.full((height, width), len(CLASSES) + 1, np.int32)  # the id of a segment of stuff
    segments[height // 2 :] = len(CLASSES) + 2
    semantic = (segments - 1).astype(np.uint8)
    segments_info = [_segment(i + 1, i, False) for i in range(len(CLASSES), len(CLASSES + STUFF))]
    annotations = []
    for n in range(3 + index % 3):
        center = (random.uniform(0.25, 0.75, 2) * (width, height)).astype(int)
        axes = (random.uniform(0.1, 0.22, 2) * (width, height)).astype(int)
        points = np.array(cv2.ellipse2Poly(center.tolist(), axes.tolist(), 0, 0, 360, 15))
        category = n % len(CLASSES)
        color = [int(c) for c in random.randint(0, 255, 3)]
        cv2.fillPoly(image, [points], color)
        cv2.fillPoly(segments, [points], 100 + n)
        cv2.fillPoly(semantic, [points], category)
        segments_info.append(_segment(100 + n, category, True))
        annotations.append(
            {
                "bbox": [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()],
                "bbox_mode": BoxMode.XYXY_ABS,
                "category_id": category,
                "segmentation": [points.astype(float).reshape(-1).tolist()],
                "iscrowd": 0,
            }
        )
    names = {key: str(folder / f"{key}_{index}.png") for key in ("image", "semantic", "panoptic")}
    cv2.imwrite(names["image"], image)
    cv2.imwrite(names["semantic"], semantic)
    rgb = np.stack([segments // 256**i % 256 for i in range(3)], axis=-1).astype(np.uint8)
    cv2.imwrite(names["panoptic"], rgb[..., ::-1])
    present = set(np.unique(segments).tolist())  # an ellipse can be hidden behind others
    return {
        "file_name": names["image"],
        "image_id": index,
        "height": height,
        "width": width,
        "annotations": annotations,
        "sem_seg_file_name": names["semantic"],
        "pan_seg_file_name": names["panoptic"],
        "segments_info": [s for s in segments_info if s["id"] in present],
    }


def _segment(segment_id: int, category: int, is_thing: bool) -> dict[str, Any]:
    return {
        "id": segment_id,
        "category_id": category,
        "isthing": is_thing,
        "iscrowd": 0,
        "area": 100,
    }


def _densepose(annotation: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    """DensePose-COCO's points: 256 pixels wide masks, part indices from 1."""
    random = np.random.RandomState(image["image_id"])
    mask = np.zeros((256, 256), np.uint8, order="F")
    mask[40:216, 40:216] = 1
    rle = coco_mask.encode(mask)
    return {
        "dp_x": random.uniform(50, 200, _NUM_POINTS).tolist(),
        "dp_y": random.uniform(50, 200, _NUM_POINTS).tolist(),
        "dp_U": random.uniform(0, 1, _NUM_POINTS).tolist(),
        "dp_V": random.uniform(0, 1, _NUM_POINTS).tolist(),
        "dp_I": random.randint(1, 25, _NUM_POINTS).astype(float).tolist(),
        "dp_masks": [rle, *[[]] * 13],
    }


def _write_densepose_transforms(file: Path) -> None:
    """Write a replacement of DensePose's download: U and V of a point in a mirrored image."""
    from scipy.io import savemat

    tables = np.empty((1, 24), dtype=object)
    for part in range(24):
        tables[0, part] = np.tile(np.linspace(0, 1, 256), (256, 1))
    savemat(file, {"U_transforms": tables, "V_transforms": tables})
