# Copyright (c) the d2_memfit developers.
"""Assumptions about datasets that cannot be read: published statistics of those known by name.

The largest numbers are rarely published, so some numbers here are guesses and marked as such. A
crowded image is taken to have 9 times the objects of a mean one, as in COCO. COCO has a mean of 7
and at most 63 (DETR paper, arXiv:2005.12872, section 4).

LVIS' largest number is the one with which mask_rcnn_vitdet_b_100ep takes the 14.4 GB that ViTDet's
README publishes for it: 775. The other rows of that table are not used (docs/HOW_ACCURATE.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from detectron2.data import MetadataCatalog

from .dataset_statistics import DatasetStatistics
from .largest_images import ANY_SIZE, DEFAULT_INSTANCES, Size, invented_dict

__all__ = ["KnownDataset", "assumed_statistics", "known_dataset"]

_CROWDED = 9  # times the mean; a guess but for COCO
_CROWDED_CLASSES = 4  # times the mean; a guess (docs/HOW_ACCURATE.md)
_MOST_CROWDED = 256  # images whose objects are counted
_MEAN_CLASSES = 10.5  # in a label image of ADE20K, arXiv:1608.05442; others are not published


@dataclass(frozen=True)
class KnownDataset:
    """
    Attributes:
        title: name for messages.
        num_instances: upper limit of the annotated objects in an image.
        mean_instances: mean number of objects per image.
        source: source of both.
        is_guess: whether ``num_instances`` is a guess.
        largest: height and width, in pixels, that no image exceeds; None if unknown.
        has_one_size: whether all images have that size.
    """

    title: str
    num_instances: int
    mean_instances: float
    source: str
    is_guess: bool
    largest: Optional[Size] = None
    has_one_size: bool = False

    def instances_per_image(self) -> tuple[int, ...]:
        """Objects of the most crowded images, the largest first.

        An exponential tail with the dataset's mean is assumed: the i-th most crowded image has
        mean x log(i) objects less than the first. For COCO this is an upper limit: 99% of its
        images have 33 objects at most, and this gives 50 there (github.com/Lextal/SotA-CV).
        """
        places = range(1, _MOST_CROWDED + 1)
        return tuple(round(self.num_instances - self.mean_instances * math.log(i)) for i in places)


# COCO's longer side has 640 pixels at most (cocodataset.org), VOC's 500 (the development kit).
_COCO = (640, 640)

_KNOWN = {
    "coco": KnownDataset(
        "COCO",
        DEFAULT_INSTANCES,
        7,
        "the paper of DETR, arXiv:2005.12872, counts 63 at most",
        False,
        _COCO,
    ),
    # LVIS v1 has 1,270,141 objects in 100,170 images (lvisdataset.org), 12.7 in the mean.
    "lvis": KnownDataset(
        "LVIS",
        775,
        12.7,
        "lvisdataset.org; the largest number, from the memory of a published run, is a guess",
        True,
        _COCO,
    ),
    # Table 2 of the paper, fine annotations: 7.0 humans and 11.8 vehicles in an image.
    "cityscapes": KnownDataset(
        "Cityscapes",
        170,
        18.8,
        "arXiv:1604.01685, table 2; 9 times that is a guess",
        True,
        (1024, 2048),
        True,
    ),
    # VOC2012 has 27,450 objects in 11,530 images (host.robots.ox.ac.uk/pascal/VOC/voc2012).
    "voc": KnownDataset(
        "PASCAL VOC",
        DEFAULT_INSTANCES,
        2.4,
        "host.robots.ox.ac.uk/pascal/VOC/voc2012; as many at most as COCO is a guess",
        True,
        (500, 500),
    ),
    # The paper has the mean. Dataset Ninja counts 468 boxes at most in a training image, ignored
    # regions included, and 377 heads (github.com/dataset-ninja/crowdhuman,
    # stats/classes_per_image.json).
    "crowdhuman": KnownDataset(
        "CrowdHuman",
        468,
        22.6,
        "arXiv:1805.00123; the largest number is Dataset Ninja's, with ignored regions",
        False,
    ),
    # Dataset Ninja, training set: 343,205 objects in 6,471 images. The most crowded one has 902 and
    # 12 ignored regions; 1500 x 2000 pixels at most (github.com/dataset-ninja/vis-drone-2019-det).
    "visdrone": KnownDataset(
        "VisDrone",
        914,
        53,
        "Dataset Ninja's counts, with ignored regions",
        False,
        (1500, 2000),
    ),
    "ade20k": KnownDataset(
        "ADE20K",
        180,
        19.5,
        "arXiv:1608.05442; 9 times that is a guess",
        True,
    ),
}


def known_dataset(names: Sequence[str]) -> Optional[KnownDataset]:
    """The most crowded of some datasets, by Detectron2's names; None if one is unknown."""
    found = [_by_name(name) for name in names]
    known = [dataset for dataset in found if dataset is not None]
    if not known or len(known) < len(found):
        return None
    return max(known, key=lambda dataset: dataset.num_instances)


def _by_name(name: str) -> Optional[KnownDataset]:
    """The dataset of a name; those with keypoints count all objects."""
    name = name.removeprefix("keypoints_")
    return next((d for prefix, d in _KNOWN.items() if name.startswith(f"{prefix}_")), None)


def assumed_statistics(
    names: Sequence[str], with_labels: bool = False, mean_instances: Optional[float] = None
) -> DatasetStatistics:
    """Statistics to assume of datasets that cannot be read.

    Args:
        with_labels: as for :func:`~.largest_images.invented_dict`.
        mean_instances: the mean number of objects in an image, if somebody has counted them.
    """
    known = known_dataset(names)
    if mean_instances is not None and known is None:
        most = math.ceil(_CROWDED * mean_instances)
        source = f"{_CROWDED} times that is a guess"
        known = KnownDataset("this dataset", most, mean_instances, source, True)
    name = (*names, "")[0]
    sizes = frozenset([known.largest] if known and known.has_one_size and known.largest else ())
    num = known.num_instances if known else DEFAULT_INSTANCES
    crowded = invented_dict(ANY_SIZE, num, name, with_labels)
    statistics = DatasetStatistics(
        sizes,
        known.instances_per_image() if known else (num,),
        crowded,
        mean_instances=(known or _KNOWN["coco"]).mean_instances,
        is_guess=known is None or known.is_guess,
        missing=f"{num} instances at most, {_source_of_objects(known)}",
        largest=known.largest if known else None,
    )
    if "annotations" in crowded or "segments_info" in crowded:
        return statistics
    num_all = len(MetadataCatalog.get(name).get("stuff_classes", ())) or DEFAULT_INSTANCES
    num = min(num_all, math.ceil(_CROWDED_CLASSES * _MEAN_CLASSES))
    missing = (
        f"{num} of {num_all} classes in each label image, a guess (ADE20K has {_MEAN_CLASSES} in "
        "the mean; arXiv:1608.05442)"
    )
    return replace(
        statistics,
        instances_per_image=(num,),
        labels=tuple(range(num)),
        mean_instances=_MEAN_CLASSES,
        is_guess=True,
        missing=missing,
    )


def _source_of_objects(known: Optional[KnownDataset]) -> str:
    if known is None:
        return "a guess"
    return f"as {known.title} may have ({known.mean_instances:.3g} in the mean; {known.source})"
