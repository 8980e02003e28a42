# Copyright (c) the d2_memfit developers.
"""Settings that a config needs for a user's dataset, and values that contradict it."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ..common.checks import value_of
from ..common.errors import ConfigError, DataError
from .coco_file import CocoFile
from .faults import check, class_keys, kinds_of, names_in

__all__ = ["Setting", "check_classes", "fine_tuning_schedule", "fit_to_data", "goes_with_data"]

# These models learn from labels of every pixel, which a COCO file does not have.
_LEARN_FROM_PIXELS = ("PanopticFPN", "SemanticSegmentor", "PanopticDeepLab")
_OF_TRAINED = "Name a file with the classes of the trained model"
_COCO_KEYPOINTS = 17  # pycocotools knows their sigmas

_SCHEDULE = ("MAX_ITER", "STEPS", "WARMUP_ITERS", "CHECKPOINT_PERIOD")  # keys of SOLVER
# Sources: the images that a run sees in Detectron2's own recipes.
# - Cityscapes/mask_rcnn_R_50_FPN.yaml, which starts from COCO's weights: 24,000 iterations of 8 of
#   2,975 images, 65 epochs. The rate is lowered at three quarters of them.
# - PascalVOC-Detection/faster_rcnn_R_50_FPN.yaml: 18,000 iterations of 16 images, 288,000.
# - COCO's 1x: 90,000 iterations of 16 of 117,266 images, 12.3 epochs.
_EPOCHS = 65
_MOST_IMAGES = 288_000
_LEAST_EPOCHS = 12.3
_LOWERED_AT = 0.75
# From the balloon dataset in Detectron2's Colab tutorial, with 61 images.
_LEAST_ITERATIONS = 300
_WARMUP = 0.1  # largest share of the iterations
_CHECKPOINTS = 10  # in a run, with at least this many iterations between them:
_LEAST_BETWEEN_CHECKPOINTS = 100


def goes_with_data(key: str) -> bool:
    """Whether a config key describes the data, or the length of the training on them."""
    return (
        key.startswith("DATASETS.")
        or key.endswith((".NUM_CLASSES", ".NUM_KEYPOINTS", "_OKS_SIGMAS"))
        or key in [f"SOLVER.{name}" for name in _SCHEDULE]
    )


class Setting(NamedTuple):
    """A config key that follows from the data; only a note if ``key`` is empty."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} {self.value}: {self.why}" if self.key else self.why


def fit_to_data(
    cfg: CfgNode, train: Sequence[CocoFile], test: Sequence[CocoFile], given: Collection[str]
) -> list[Setting]:
    """Settings that follow from the data, for keys that the user has not given.

    Args:
        cfg: as loaded.
        train, test: the files of its datasets, as far as known. Without ``train``, only evaluation
            is checked.
        given: keys set by the user, such as on the command line.

    Raises:
        ConfigError: a given value does not fit the data.
        DataError: the datasets do not fit each other, or lack labels that the model needs.
    """
    files = [*train, *test]
    if not files:
        return []
    for file in files[1:]:
        if file.classes != files[0].classes:
            both = [f"{names_in(f.classes)} in {f.json_file}" for f in (files[0], file)]
            raise DataError(
                f"the datasets {files[0].name} and {file.name} have different categories: "
                f"{', and '.join(both)}. Write the same categories in the same order into both"
            )
    settings = _classes(cfg, files[0], given, "" if train else _OF_TRAINED)
    if train and cfg.MODEL.META_ARCHITECTURE in _LEARN_FROM_PIXELS:
        raise ConfigError(
            f"a {cfg.MODEL.META_ARCHITECTURE} learns from labels of every pixel, which "
            f"{files[0].json_file} does not have: register such a dataset in your own script, or "
            "use a config of COCO-InstanceSegmentation"
        )
    for file in files:
        check(file.summary, kinds_of(cfg), f"{file.name}, {file.json_file}: ", in_file=True)
        if cfg.MODEL.KEYPOINT_ON and file.odd_keypoints:
            raise DataError(
                f"{file.name}, {file.json_file}: keypoints of {len(file.odd_keypoints)} objects "
                f"are not three numbers (x, y, visibility) for each of "
                f"{len(file.keypoint_names)} names. Correct them; the first has the id "
                f"{file.odd_keypoints[0]}"
            )
    fields = ["iscrowd", "num_keypoints"] if cfg.MODEL.KEYPOINT_ON else ["iscrowd"]
    for file in test:
        if cfg.MODEL.MASK_ON:
            where = f"{file.name}, {file.json_file}: "
            check(file.summary, {"evaluated mask"}, where, in_file=True)
        if without := file.without(fields):  # which pycocotools needs, after hours of training
            raise DataError(
                f"{file.name} cannot be evaluated: {len(without)} annotations in {file.json_file} "
                f"have no {' or no '.join(['area', *fields])}, the first has the id {without[0]}. "
                "Add them: area is the mask's area, or the box's if there is no mask, and iscrowd "
                f"is 0{', and num_keypoints those that are labelled' if fields[1:] else ''}"
            )
    for file in train if cfg.MODEL.KEYPOINT_ON else ():
        settings += _keypoints(cfg, file, given)
    return [*settings, *(_schedule(cfg, train, given) if train else ())]


def _setting(
    cfg: CfgNode, key: str, value: Any, given: Collection[str], has: str, why: str, advice: str = ""
) -> list[Setting]:
    """The setting for a value that follows from the data; an error if the user gave another."""
    if value_of(cfg, key) == value:
        return []
    if key in given:
        advice = advice or f"Leave the key out, or set it to {value}"
        raise ConfigError(f"{key} {value_of(cfg, key)} does not fit the data: {has}. {advice}")
    return [Setting(key, value, why)]


def _classes(
    cfg: CfgNode, file: CocoFile, given: Collection[str], advice: str = ""
) -> list[Setting]:
    num, names, keys = len(file.classes), names_in(file.classes), class_keys(cfg)
    if keys is None:
        note = f"number of classes in {file.name}: {num}. Set the key from which "
        note += f"{cfg.MODEL.META_ARCHITECTURE} takes it, such as MODEL.ROI_HEADS.NUM_CLASSES"
        return [Setting("", None, note)]
    has = f"{file.json_file} has {num} categories ({names})"
    why = f"the categories of {file.name}: {names}"
    each = [_setting(cfg, key, num, given, has, why, advice) for key in keys]
    return [setting for settings in each for setting in settings]


def check_classes(cfg: CfgNode, file: CocoFile) -> None:
    """Raise :class:`ConfigError` unless a trained model predicts the classes of the data."""
    _classes(cfg, file, class_keys(cfg) or (), _OF_TRAINED)


def _keypoints(cfg: CfgNode, file: CocoFile, given: Collection[str]) -> list[Setting]:
    num = len(file.keypoint_names)
    has = f"{file.json_file} has {num} keypoints for each object"
    why = f"the keypoints of {file.name}: {names_in(file.keypoint_names)}"
    settings = _setting(cfg, "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", num, given, has, why)
    if (len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or _COCO_KEYPOINTS) != num:
        why = "assumed: how far keypoints may be off in evaluation"
        settings += _setting(cfg, "TEST.KEYPOINT_OKS_SIGMAS", [0.05] * num, given, has, why)
    return settings


def _schedule(cfg: CfgNode, train: Sequence[CocoFile], given: Collection[str]) -> Iterator[Setting]:
    filters = cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    counted = "num_images_with_objects" if filters else "num_images"
    num_images = sum(getattr(file.summary, counted) for file in train)
    solver = cfg.SOLVER
    batch = solver.IMS_PER_BATCH * solver.get("ACCUMULATION_STEPS", 1)
    proposed = fine_tuning_schedule(num_images, batch, solver)
    enough = proposed["SOLVER.MAX_ITER"]
    what = f"a fine-tuning on {num_images} images, {batch} in each iteration"
    if "SOLVER.MAX_ITER" in given:
        late = any(step >= solver.MAX_ITER for step in solver.STEPS)
        proposed = _periods(solver.MAX_ITER, solver) if late else {}
    elif enough >= solver.MAX_ITER:
        return  # a dataset as large as the config's
    for key, value in proposed.items():
        if key not in given and value != value_of(cfg, key):
            yield Setting(key, value, what if key == "SOLVER.MAX_ITER" else "goes with MAX_ITER")


def fine_tuning_schedule(num_images: int, batch: int, solver: CfgNode) -> dict[str, Any]:
    """Config keys of a fine-tuning schedule on this many images, with this effective batch.

    Args:
        solver: its WARMUP_ITERS and CHECKPOINT_PERIOD are only shortened.
    """
    images_seen = max(min(_EPOCHS * num_images, _MOST_IMAGES), _LEAST_EPOCHS * num_images)
    max_iter = max(math.ceil(images_seen / batch), _LEAST_ITERATIONS)
    return {"SOLVER.MAX_ITER": max_iter, **_periods(max_iter, solver)}


def _periods(max_iter: int, solver: CfgNode) -> dict[str, Any]:
    """The rest of the schedule for a number of iterations."""
    period = max(max_iter // _CHECKPOINTS, _LEAST_BETWEEN_CHECKPOINTS)
    return {
        "SOLVER.STEPS": (int(_LOWERED_AT * max_iter),) if max_iter > 2 else (),
        "SOLVER.WARMUP_ITERS": min(solver.WARMUP_ITERS, int(_WARMUP * max_iter)),
        "SOLVER.CHECKPOINT_PERIOD": min(solver.CHECKPOINT_PERIOD, period),
    }
