# Copyright (c) the d2_memfit developers.
"""Statistics of datasets on disk that decide the largest batch: sizes, objects and classes."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Optional, Union

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from ..common.files import is_file
from ..common.side_work import alone, no_information, unchanged_random_state
from ..data.images import size_of_image
from .label_images import labels_in
from .largest_images import Size, dict_of_size, num_instances_of, with_instances

__all__ = ["DatasetStatistics", "statistics_of"]

logger = logging.getLogger(__name__)

_MOST_HEADERS = 10_000  # image files whose sizes are read: some 3 s on a local disk


@dataclass(frozen=True)
class DatasetStatistics:
    """What decides the largest batch of some datasets.

    Attributes:
        sizes: sizes of all images; none if they are unknown.
        instances_per_image: annotated objects of each image that has any, the largest first.
            Without objects, the classes in each label image. If they are assumed, only those of the
            most crowded images.
        most_crowded: dataset dict of the most crowded image.
        label_files: label images, if there are no objects.
        labels: values of a label image with the most classes; none before they are counted.
        mean_instances: mean of ``instances_per_image``; None if unknown.
        is_guess: whether ``instances_per_image`` is a guess.
        missing: what is assumed in place of datasets that cannot be read; "" for others.
        lines: other assumptions.
        largest: a size that no image exceeds, if the sizes are unknown; None if that is, too.
    """

    sizes: frozenset[Size]
    instances_per_image: tuple[int, ...]
    most_crowded: dict[str, Any]
    label_files: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    mean_instances: Optional[float] = None
    is_guess: bool = False
    missing: str = ""
    lines: tuple[str, ...] = ()
    largest: Optional[Size] = None

    @property
    def num_instances(self) -> int:
        """Objects of the most crowded image."""
        return self.instances_per_image[0]

    def num_in_batch(self, index: int) -> int:
        """Most objects in an image of a batch, next to ``index`` images with at least as many.

        A dataset with fewer images than the batch starts over.
        """
        return self.instances_per_image[index % len(self.instances_per_image)]

    def any_dict(self) -> dict[str, Any]:
        """A dataset dict that no loader filters out."""
        d = dict_of_size(self.most_crowded, _size_of(self.most_crowded))
        return d if "annotations" not in d or num_instances_of(d) else with_instances(d, 1)

    def with_labels(self, names: Sequence[str]) -> "DatasetStatistics":
        """The same datasets, with the classes in their label images counted.

        Args:
            names: names of the datasets, whose metadata tells which label is none.
        """
        if not self.label_files:
            return self
        ignored = {MetadataCatalog.get(name).get("ignore_label", 255) for name in names}
        labels = labels_in(self.label_files, frozenset(ignored))
        num_read = len(labels.classes_per_image)
        is_guess = num_read < len(self.label_files)
        line = (
            f"no label image of {', '.join(names)} has more classes than {num_read} of "
            f"{len(self.label_files)}: {labels.classes_per_image[0]}, a guess"
        )
        return replace(
            self,
            labels=labels.values,
            instances_per_image=tuple(max(num, 1) for num in labels.classes_per_image),
            mean_instances=mean(labels.classes_per_image),
            is_guess=is_guess,
            lines=(*self.lines, line) if is_guess else self.lines,
        )

    def with_instances(self, num: int) -> "DatasetStatistics":
        """The same datasets with another number of objects in the most crowded image."""
        if self.labels:
            others = (i for i in range(num) if i not in self.labels)
            labels = (*self.labels, *others)[:num]
            return replace(self, labels=labels, instances_per_image=(num,), is_guess=False)
        crowded = with_instances(self.most_crowded, num)
        return replace(self, most_crowded=crowded, instances_per_image=(num,), is_guess=False)


def statistics_of(names: Union[str, Sequence[str]]) -> Optional[DatasetStatistics]:
    """Statistics of some datasets; None if one of them cannot be read."""
    found = []
    for name in [names] if isinstance(names, str) else names:
        if name not in DatasetCatalog:
            return None
        metadata = MetadataCatalog.get(name)
        json_file = metadata.get("panoptic_json", metadata.get("json_file"))
        if json_file and not is_file(json_file):  # loading could download it
            return None
        statistics = _statistics_of_one(name, DatasetCatalog[name])
        if statistics is None:
            return None
        found.append(statistics)
    if not found:
        return None
    most = max(found, key=lambda one: one.num_instances)
    numbers = sorted((num for one in found for num in one.instances_per_image), reverse=True)
    return replace(
        most,
        instances_per_image=tuple(numbers),
        mean_instances=mean(numbers),
        sizes=frozenset().union(*(one.sizes for one in found)),
        label_files=sum((one.label_files for one in found), ()),
        lines=sum((one.lines for one in found), ()),
    )


# Statistics by name, with the function registered then: reading COCO takes 20 seconds.
_known: dict[str, tuple[Callable[..., Any], Optional[DatasetStatistics]]] = {}


def _statistics_of_one(name: str, load: Callable[..., Any]) -> Optional[DatasetStatistics]:
    if name in _known and _known[name][0] is load and _known[name][1] is not None:
        return _known[name][1]
    statistics = None
    with alone(), no_information(), unchanged_random_state():
        try:
            dicts = load()
            statistics = _statistics_of_dicts(name, dicts) if dicts else None
        except Exception as e:  # any file, package or check of a dataset may fail
            logger.info("The dataset %s cannot be read: %s: %s", name, type(e).__name__, e)
    _known[name] = load, statistics
    return statistics


def _statistics_of_dicts(name: str, dicts: Sequence[dict[str, Any]]) -> DatasetStatistics:
    nums = [num_instances_of(d) for d in dicts]
    crowded = _with_size(dicts[nums.index(max(nums))])
    numbers = sorted(filter(None, nums), reverse=True) or [1]
    step = 1
    if any("height" not in d for d in dicts):  # of label images, or of segments
        step = -(-len(dicts) // _MOST_HEADERS)
    sizes = [_size_of(d) for d in (crowded, *dicts[::step])]
    lines = [f"no image of {name} is larger than one in {step} of them"] if step > 1 else []
    statistics = DatasetStatistics(
        frozenset(sizes),
        tuple(numbers),
        crowded,
        mean_instances=mean(numbers),
        lines=tuple(lines),
    )
    if "annotations" in crowded or "segments_info" in crowded:
        return statistics
    files = tuple(d["sem_seg_file_name"] for d in dicts if "sem_seg_file_name" in d)
    return replace(statistics, label_files=files)


def _with_size(d: dict[str, Any]) -> dict[str, Any]:
    height, width = _size_of(d)
    return {**d, "height": height, "width": width}


def _size_of(d: dict[str, Any]) -> Size:
    """Height and width of a dataset dict's image, or those that its file has for Detectron2."""
    if "height" in d and "width" in d:
        return d["height"], d["width"]
    width, height = size_of_image(PathManager.get_local_path(d["file_name"]))
    return height, width
