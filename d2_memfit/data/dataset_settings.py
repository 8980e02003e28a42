# Copyright (c) the d2_memfit developers.
"""Settings that a config needs for a user's dataset, and values that contradict it."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Optional

from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg

from ..common.checks import value_of
from ..errors import ConfigError, DataError
from .annotations import TOLERABLE, check_boxes, check_masks, complaints_about_labels
from .coco_file import CocoFile
from .schedule import RULE, SCHEDULE_KEYS, fine_tuning_schedule, periods

__all__ = ["Setting", "check_classes", "classes_of_model", "fit_to_data", "goes_with_data"]

# These models learn from labels of every pixel, which a COCO file does not have.
_LEARN_FROM_PIXELS = ("PanopticFPN", "SemanticSegmentor", "PanopticDeepLab")
# The key with the number of classes, by meta architectures; "" if there is none.
_CLASS_KEYS = {
    "GeneralizedRCNN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "PanopticFPN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "RetinaNet": "MODEL.RETINANET.NUM_CLASSES",
    "ProposalNetwork": "",
    "SemanticSegmentor": "",
    "PanopticDeepLab": "",
    "TransformersDetector": "MODEL.ROI_HEADS.NUM_CLASSES",  # of projects/Transformers
}
_COCO_KEYPOINTS = 17  # pycocotools knows their sigmas
_SHOWN = 5  # names in a message
# A schedule that is longer than the rule's by more than this factor gets a note.
_MUCH_LONGER = 3


def goes_with_data(key: str) -> bool:
    """Whether a config key describes the data, or the length of the training on them."""
    return (
        key.startswith("DATASETS.")
        or key.endswith((".NUM_CLASSES", ".NUM_KEYPOINTS", "_OKS_SIGMAS"))
        or key in SCHEDULE_KEYS
    )


class Setting(NamedTuple):
    """A config key that follows from the data; only a note if ``key`` is empty."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} {self.value}: {self.why}" if self.key else self.why


def _note(text: str) -> Setting:
    return Setting("", None, text)


def fit_to_data(
    cfg: CfgNode,
    train: Sequence[CocoFile],
    test: Sequence[CocoFile],
    given: Collection[str],
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
            raise DataError(
                f"the datasets {files[0].name} and {file.name} have different categories: "
                f"{_names(files[0].classes)} in {files[0].json_file}, and {_names(file.classes)} "
                f"in {file.json_file}. Write the same categories in the same order into both"
            )
    settings = list(_classes(cfg, files[0], given, trains=bool(train)))
    if train and cfg.MODEL.META_ARCHITECTURE in _LEARN_FROM_PIXELS:
        raise ConfigError(
            f"a {cfg.MODEL.META_ARCHITECTURE} learns from labels of every pixel, which "
            f"{files[0].json_file} does not have: register such a dataset in your own script, or "
            "use a config of COCO-InstanceSegmentation"
        )
    for file in files:
        _check_labels(cfg, file)
    for file in test:
        _check_ground_truth(file)
        if not file.summary.num_objects:
            note = f"{file.json_file} has no objects, so evaluation on {file.name} gives no AP"
            settings.append(_note(note))
    for file in train:
        settings += _keypoints(cfg, file, given)
    if train:
        settings += _schedule(cfg, train, given)
    return settings


def _classes(
    cfg: CfgNode, file: CocoFile, given: Collection[str], trains: bool
) -> Iterator[Setting]:
    num_classes = len(file.classes)
    keys = [k for k in (_CLASS_KEYS.get(cfg.MODEL.META_ARCHITECTURE), *_class_keys(cfg)) if k]
    if not keys and cfg.MODEL.META_ARCHITECTURE not in _CLASS_KEYS:
        yield _note(
            f"number of classes in {file.name}: {num_classes}. Set the key from which "
            f"{cfg.MODEL.META_ARCHITECTURE} takes it, such as MODEL.ROI_HEADS.NUM_CLASSES"
        )
    for key in keys:
        value = value_of(cfg, key)
        if value == num_classes:
            continue
        if key in given:
            advice = f"Leave the key out, or set it to {num_classes}"
            raise ConfigError(
                f"{key} {value} does not fit the data: {file.json_file} has {num_classes} "
                f"categories ({_names(file.classes)}). "
                f"{advice if trains else 'Name a file with the classes of the trained model'}"
            )
        yield Setting(key, num_classes, f"the categories of {file.name}: {_names(file.classes)}")


def classes_of_model(cfg: CfgNode) -> Optional[tuple[str, int]]:
    """The key with the model's number of classes, and its value; None if unknown."""
    key = _CLASS_KEYS.get(cfg.MODEL.META_ARCHITECTURE)
    keys = [key] if key is not None else _class_keys(cfg)
    return (keys[0], value_of(cfg, keys[0])) if keys and keys[0] else None


def check_classes(cfg: CfgNode, file: CocoFile) -> None:
    """Raise :class:`ConfigError` unless a trained model predicts the classes of the data."""
    key = _CLASS_KEYS.get(cfg.MODEL.META_ARCHITECTURE)
    if key == "":
        raise ConfigError(f"a {cfg.MODEL.META_ARCHITECTURE} does not predict classes")
    if key is not None:
        list(_classes(cfg, file, {key}, trains=False))


def _class_keys(cfg: CfgNode) -> list[str]:
    """Keys with a number of classes that a project has added."""
    known = get_detectron2_cfg().MODEL
    return [
        f"MODEL.{name}.NUM_CLASSES"
        for name, node in cfg.MODEL.items()
        if name not in known and isinstance(node, CfgNode) and "NUM_CLASSES" in node
    ]


def _check_labels(cfg: CfgNode, file: CocoFile) -> None:
    """Raise an error for faults that end training. The trainer warns about the others."""
    where = f"{file.name}, {file.json_file}: "
    check_boxes(file.summary, where)
    check_masks(cfg, file.summary, where)
    for fault, complaint in complaints_about_labels(cfg, file.summary):
        if fault not in TOLERABLE:
            raise DataError(where + complaint)


def _check_ground_truth(file: CocoFile) -> None:
    """Check what pycocotools needs to evaluate, before hours of training."""
    if file.without_area:
        raise DataError(
            f"{file.name} cannot be evaluated: {len(file.without_area)} annotations in "
            f"{file.json_file} have no area or no iscrowd, the first has the id "
            f"{file.without_area[0]}. Add them: area is the mask's area, or the box's if there is "
            "no mask, and iscrowd is 0"
        )


def _keypoints(cfg: CfgNode, file: CocoFile, given: Collection[str]) -> Iterator[Setting]:
    if not cfg.MODEL.KEYPOINT_ON:
        return
    key = "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS"
    number = len(file.keypoint_names)
    value = value_of(cfg, key)
    if value != number and key in given:
        raise ConfigError(
            f"{key} {value} does not fit the data: {file.json_file} has {number} keypoints for "
            f"each object. Leave the key out, or set it to {number}"
        )
    if value != number:
        yield Setting(key, number, f"the keypoints of {file.name}: {_names(file.keypoint_names)}")
    key = "TEST.KEYPOINT_OKS_SIGMAS"
    if (len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or _COCO_KEYPOINTS) != number:
        if key in given:
            raise ConfigError(
                f"{key} must have {number} numbers, one for each keypoint. Leave the key out, or "
                "begin with 0.05 for each"
            )
        yield Setting(key, [0.05] * number, "assumed: how far keypoints may be off in evaluation")


def _schedule(cfg: CfgNode, train: Sequence[CocoFile], given: Collection[str]) -> Iterator[Setting]:
    filters = cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
    num_images = sum(
        f.summary.num_images_with_objects if filters else f.summary.num_images for f in train
    )
    solver = cfg.SOLVER
    batch = solver.IMS_PER_BATCH * solver.get("ACCUMULATION_STEPS", 1)
    of_recipe = (solver.WARMUP_ITERS, solver.CHECKPOINT_PERIOD)
    proposed = fine_tuning_schedule(num_images, batch, *of_recipe)
    what = f"a fine-tuning on {num_images} images, {batch} in each iteration"
    max_iter = proposed["SOLVER.MAX_ITER"]
    assert isinstance(max_iter, int)
    if "SOLVER.MAX_ITER" in given:
        epochs = solver.MAX_ITER * batch / num_images
        if _MUCH_LONGER * max_iter < solver.MAX_ITER:
            yield _note(
                f"SOLVER.MAX_ITER {solver.MAX_ITER} is kept: {epochs:,.0f} epochs of {num_images} "
                f"images. For {what}, SOLVER.MAX_ITER {max_iter} is enough ({RULE})"
            )
        proposed = {"SOLVER.MAX_ITER": solver.MAX_ITER}
        if any(step >= solver.MAX_ITER for step in solver.STEPS):
            proposed.update(periods(solver.MAX_ITER, *of_recipe))
    elif max_iter >= solver.MAX_ITER:
        epochs = solver.MAX_ITER * batch / num_images
        yield _note(
            f"SOLVER.MAX_ITER {solver.MAX_ITER} is from the config: {epochs:,.1f} epochs of "
            f"{num_images} images, {batch} in each iteration"
        )
        return
    late = [step for step in solver.STEPS if step >= max_iter]
    if "SOLVER.STEPS" in given and "SOLVER.MAX_ITER" not in given and late:
        yield _note(f"SOLVER.STEPS {solver.STEPS}: SOLVER.MAX_ITER is {max_iter}")
    for key, value in proposed.items():
        if key not in given and value != value_of(cfg, key):
            why = f"{what}: {RULE}" if key == "SOLVER.MAX_ITER" else "goes with MAX_ITER"
            yield Setting(key, value, why)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
