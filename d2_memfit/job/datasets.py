# Copyright (c) the d2_memfit developers.
"""What decides the largest batch of datasets: read from their files, or assumed by their names.

And dataset dicts of any size and number of objects.

The largest numbers of objects are rarely published, so some numbers here are guesses and marked as
such. A crowded image is taken to have 9 times the objects of a mean one, as in COCO. COCO has a
mean of 7 and at most 63 (DETR paper, arXiv:2005.12872, section 4).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any, Optional

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import read_image
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from pycocotools import mask as coco_mask

from ..common.files import is_file
from ..common.side_work import aside
from ..data.faults import size_of_image

__all__ = ["ANY_SIZE", "Size", "Statistics", "assumed_statistics", "boxes_anywhere", "dict_of"]
__all__ += ["invented_dict", "num_objects_of", "statistics_of"]

Size = tuple[int, int]  # height and width in pixels

DEFAULT_INSTANCES = 100  # if nothing is known; COCO's most crowded training image has 93
ANY_SIZE = (800, 1333)  # of an image, where nothing depends on it
_CROWDED = 9  # times the mean; a guess but for COCO
_MOST_CROWDED = 256  # images whose objects are counted
_MEAN_CLASSES = 10.5  # in a label image of ADE20K, arXiv:1608.05442; others are not published
_MOST_CLASSES = 42  # 4 times the mean, a guess (docs/HOW_ACCURATE.md)
_MOST_LABELS = 100  # label images that are read: 5 CPU s for the 2 megapixels of Cityscapes
_MOST_HEADERS = 10_000  # image files whose sizes are read: some 3 s on a local disk

_INVENTED: dict[str, Any] = {
    "bbox": [0] * 4,
    "category_id": 0,
    "iscrowd": 0,
    "segmentation": [],
    "keypoints": [0] * 51,  # COCO's 17
}
_SEGMENT = {"category_id": 0, "iscrowd": 0, "isthing": True, "area": 1.0}


@dataclass(frozen=True)
class Statistics:
    """What decides the largest batch of some datasets.

    Attributes:
        sizes: sizes of all images; none if they are unknown.
        instances_per_image: annotated objects of each image that has any, the largest first.
            Without objects, the classes in each label image. If they are assumed, only those of the
            most crowded images.
        most_crowded: dataset dict of the most crowded image.
        mean_instances: mean of ``instances_per_image``.
        labels: values of a label image with the most classes, if there are no objects.
        is_guess: whether ``instances_per_image`` is a guess.
        missing: what is assumed in place of datasets that cannot be read; "" for others.
        lines: other assumptions.
        largest: a size that no image exceeds; None if it is unknown.
    """

    sizes: frozenset[Size]
    instances_per_image: tuple[int, ...]
    most_crowded: dict[str, Any]
    mean_instances: float
    labels: tuple[int, ...] = ()
    is_guess: bool = False
    missing: str = ""
    lines: tuple[str, ...] = ()
    largest: Optional[Size] = None

    @property
    def num_instances(self) -> int:
        """Objects of the most crowded image."""
        return self.instances_per_image[0]

    def with_instances(self, num: int) -> "Statistics":
        """The same datasets with another number of objects in the most crowded image."""
        labels, crowded = self.labels, self.most_crowded
        if labels:
            labels = (*labels, *(i for i in range(num) if i not in labels))[:num]
        else:
            crowded = dict_of(crowded, (crowded["height"], crowded["width"]), num)
        return replace(
            self, labels=labels, most_crowded=crowded, instances_per_image=(num,), is_guess=False
        )


@dataclass(frozen=True)
class _Known:
    """Published numbers of a dataset.

    Attributes:
        most, mean: objects in the most crowded image, at most, and in the mean.
        is_guess: whether ``most`` is a guess.
        largest: height and width, in pixels, that no image exceeds.
        has_one_size: whether all images have that size.
    """

    title: str
    most: int
    mean: float
    is_guess: bool
    source: str
    largest: Optional[Size] = None
    has_one_size: bool = False


# By the start of Detectron2's name. COCO's longer side has 640 pixels at most (cocodataset.org).
_KNOWN = {
    "coco": _Known("COCO", 100, 7, False, "arXiv:2005.12872 counts 63 at most", (640, 640)),
    # LVIS v1 has 1,270,141 objects in 100,170 images (lvisdataset.org). With 775 in an image,
    # mask_rcnn_vitdet_b_100ep takes the 14.4 GB that ViTDet's README publishes for it.
    "lvis": _Known(
        "LVIS", 775, 12.7, True, "the first is a guess, by a published run's memory", (640, 640)
    ),
    # Table 2 of the paper, fine annotations: 7.0 humans and 11.8 vehicles in an image.
    "cityscapes": _Known(
        "Cityscapes", 170, 18.8, True, "9 times arXiv:1604.01685 is a guess", (1024, 2048), True
    ),
}


_UNKNOWN = _Known("", DEFAULT_INSTANCES, 7, True, "")


def assumed_statistics(
    names: Sequence[str], with_labels: bool = False, mean_instances: Optional[float] = None
) -> Statistics:
    """Statistics to assume of datasets that cannot be read.

    Args:
        with_labels: as for :func:`invented_dict`.
        mean_instances: the mean number of objects in an image, if somebody has counted them.
    """
    name = (*names, "")[0]
    prefixes = [n.removeprefix("keypoints_").partition("_")[0] for n in names]
    found = [_KNOWN.get(prefix, _UNKNOWN) for prefix in prefixes]  # the most crowded counts
    known = _UNKNOWN if _UNKNOWN in found else max(found, key=lambda k: k.most, default=_UNKNOWN)
    if mean_instances is not None and known is _UNKNOWN:
        most, source = math.ceil(_CROWDED * mean_instances), f"{_CROWDED} times that is a guess"
        known = _Known("this dataset", most, mean_instances, True, source)
    crowded = invented_dict(ANY_SIZE, known.most, name, with_labels)
    # An exponential tail with the mean is assumed: the i-th most crowded image has mean x log(i)
    # objects less than the first. For COCO this is an upper limit: 99% of its images have 33
    # objects at most, and this gives 50 there (github.com/Lextal/SotA-CV).
    numbers = [round(known.most - known.mean * math.log(i)) for i in range(1, _MOST_CROWDED + 1)]
    labels = range(0)
    missing = (
        f"{known.most} instances at most, as {known.title} may have ({known.mean:.3g} in the mean; "
        f"{known.source})"
    )
    if not {"annotations", "segments_info"} & crowded.keys():
        num_all = len(MetadataCatalog.get(name).get("stuff_classes", ())) or DEFAULT_INSTANCES
        labels = range(min(num_all, _MOST_CLASSES))
        numbers = [len(labels)]
        missing = (
            f"{len(labels)} of {num_all} classes in each label image, a guess (ADE20K has "
            f"{_MEAN_CLASSES} in the mean; arXiv:1608.05442)"
        )
    elif known is _UNKNOWN:
        numbers, missing = [known.most], f"{known.most} instances at most, a guess"
    return Statistics(
        sizes=frozenset([known.largest] if known.largest and known.has_one_size else ()),
        instances_per_image=tuple(numbers),
        most_crowded=crowded,
        mean_instances=_MEAN_CLASSES if labels else known.mean,
        labels=tuple(labels),
        is_guess=known.is_guess or bool(labels),
        missing=missing,
        largest=known.largest,
    )


def statistics_of(names: Sequence[str]) -> Optional[Statistics]:
    """Statistics of some datasets; None if one of them cannot be read."""
    found: list[Any] = [_statistics_of_one(name) for name in names]
    if not found or None in found:
        return None
    numbers = sorted((num for one in found for num in one.instances_per_image), reverse=True)
    sizes = frozenset().union(*(one.sizes for one in found))
    return replace(
        max(found, key=lambda one: one.num_instances),
        instances_per_image=tuple(numbers),
        mean_instances=mean(numbers),
        sizes=sizes,
        largest=max(sizes, key=math.prod),
        lines=sum((one.lines for one in found), ()),
    )


def _statistics_of_one(name: str) -> Optional[Statistics]:
    with aside(), suppress(Exception):  # any file, package or check of a dataset may fail
        load, metadata = DatasetCatalog[name], MetadataCatalog.get(name)
        json_file = metadata.get("panoptic_json", metadata.get("json_file"))
        if not json_file or is_file(json_file):  # loading could download it
            return _statistics_of_registered(name, load)
    return None


@cache  # reading COCO takes 20 seconds
def _statistics_of_registered(name: str, load: Callable[[], Any]) -> Statistics:
    dicts = load()
    nums = [num_objects_of(d) for d in dicts]
    crowded = dicts[nums.index(max(nums))]
    height, width = _size_of(crowded)
    crowded = {**crowded, "height": height, "width": width}
    numbers, lines = sorted(filter(None, nums), reverse=True) or [1], []
    labels: tuple[int, ...] = ()
    headers = sum("height" not in d for d in dicts)  # of label images, or of segments
    step = max(-(-headers // _MOST_HEADERS), 1)
    if step > 1:
        lines.append(f"no image of {name} is larger than one in {step} of them")
    sizes = frozenset(_size_of(d) for d in (crowded, *dicts[::step]))
    if not {"annotations", "segments_info"} & crowded.keys():
        files = [d["sem_seg_file_name"] for d in dicts[:: -(-len(dicts) // _MOST_LABELS)]]
        found = sorted((_labels_in(file, name) for file in files), key=len, reverse=True)
        labels, numbers = found[0], [max(len(values), 1) for values in found]
    return Statistics(sizes, tuple(numbers), crowded, mean(numbers), labels, lines=tuple(lines))


def _labels_in(file: str, name: str) -> tuple[int, ...]:
    """The classes in a label image of a dataset."""
    values = np.unique(read_image(file))
    return tuple(values[values != MetadataCatalog.get(name).get("ignore_label", 255)].tolist())


def _size_of(d: dict[str, Any]) -> Size:
    """Height and width of a dataset dict's image, or those that its file has for Detectron2."""
    if "height" in d and "width" in d:
        return d["height"], d["width"]
    width, height = size_of_image(PathManager.get_local_path(d["file_name"]))
    return height, width


def num_objects_of(d: dict[str, Any]) -> int:
    """Number of objects; with keypoints, only objects with visible ones.

    Mappers and loaders look for these.
    """
    objects = [a for a in d.get("annotations", ()) if not a.get("iscrowd", 0)]
    visible = [a for a in objects if any(v > 0 for v in a.get("keypoints", (1, 1, 1))[2::3])]
    return len(visible) or len(d.get("segments_info", ()))


def dict_of(d: dict[str, Any], size: Size, num: Optional[int] = None) -> dict[str, Any]:
    """A dataset dict as if its image had another size, with boxes and masks anywhere in it.

    Args:
        num: number of objects or segments, if it is another. The dict's own objects are repeated.
    """
    made = {"file_name": "", **d, "height": size[0], "width": size[1]}
    if "annotations" in d:
        own = [a for a in d["annotations"] if not a.get("iscrowd", 0)]
        boxes = boxes_anywhere(len(own) if num is None else num, size).tolist()
        own = own or [_INVENTED]
        made["annotations"] = [_moved(own[i % len(own)], box, size) for i, box in enumerate(boxes)]
    if "segments_info" in d and num is not None:
        made["segments_info"] = [{"id": i + 1, **_SEGMENT} for i in range(num)]
    return made


def _moved(annotation: dict[str, Any], box: list[float], size: Size) -> dict[str, Any]:
    """An annotation with another box [x0, y0, x1, y1]."""
    x0, y0, x1, y1 = box
    moved = dict(annotation if "bbox" in annotation else _INVENTED)
    polygons = [[x0, y0, x1, y0, x1, y1, x0, y1]]
    if isinstance(moved.get("segmentation"), dict):  # a run-length code
        moved["segmentation"] = coco_mask.merge(coco_mask.frPyObjects(polygons, *size))
    elif "segmentation" in moved:
        moved["segmentation"] = polygons
    if "keypoints" in moved:
        moved["keypoints"] = [(x0 + x1) / 2, (y0 + y1) / 2, 2] * (len(moved["keypoints"]) // 3)
    if len(moved["bbox"]) == 5:  # it has an angle
        box = [(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0, 0.0]
    mode = BoxMode.XYWHA_ABS if len(box) == 5 else BoxMode.XYXY_ABS
    return {**moved, "bbox": box, "bbox_mode": mode}


def invented_dict(
    size: Size, num_instances: int, name: str = "", with_labels: bool = False
) -> dict[str, Any]:
    """Make a dataset dict of Detectron2's format, with boxes, polygons and keypoints.

    Args:
        name: the missing dataset. Its metadata tells the number of keypoints, and whether there are
            label images or segments in place of annotations.
        with_labels: whether there are label images, if there is no such metadata.
    """
    metadata = MetadataCatalog.get(name) if name in MetadataCatalog.list() else None
    kind = metadata.get("evaluator_type", "") if metadata is not None else ""
    names = metadata.get("keypoint_names", ()) if metadata is not None else ()
    d: dict[str, Any] = {"file_name": "", "image_id": 0}
    if "sem_seg" in kind or "panoptic" in kind or with_labels:
        d["sem_seg_file_name"] = ""
    # Detectron2's datasets of this name have annotations, and label images of stuff.
    if "panoptic" in kind and not name.endswith("_separated"):
        d.update(pan_seg_file_name="", segments_info=[])
    elif "sem_seg" not in kind:
        annotation = {**_INVENTED, "keypoints": [0] * 3 * len(names)} if names else _INVENTED
        d["annotations"] = [annotation]
    return dict_of(d, size, num_instances)


def boxes_anywhere(num: int, size: Size, seed: int = 0) -> Any:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    corner, length = np.random.RandomState(seed).rand(2, num, 2)
    extent = size[::-1]
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return np.concatenate([corner, corner + length], axis=1)
