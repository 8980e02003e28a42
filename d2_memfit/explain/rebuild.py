# Copyright (c) the d2_memfit developers.
"""The job of a logged run, made again from what its log says."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import yaml
from detectron2 import data
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.engine import DefaultTrainer
from detectron2.modeling import META_ARCH_REGISTRY

from ..common.errors import ConfigError
from ..common.files import SafeLoader
from ..config.cards import Card, find_card
from ..config.keys import leaves
from ..config.load import load_cfg, with_settings
from ..data.registration import register_coco
from ..job import Job
from ..planner.device import DeviceModel
from .records import LoggedRun

__all__ = ["Help", "card_of", "rebuild", "release_of"]

# Values of the log that are of its machine.
_HERE = {"OUTPUT_DIR": "./output", "MODEL.DEVICE": "cuda", "VERSION": 2}
_MOST_CLASSES = 10_000  # of a dataset: more is a mistake
_KINDS = {"semantic": "sem_seg", "panoptic": "coco_panoptic_seg"}


@dataclass(frozen=True)
class Help:
    """What a log does not say, and a user can.

    Attributes:
        add_keys: functions that add a project's keys.
        trainer: the class that trains.
        coco: datasets, as ``register_coco`` takes them; the first is trained on.
        image_size: height and width, in pixels, of the largest image file.
        num_instances: objects of the most crowded image.
        lazy_job: makes the job of a LazyConfig, whose code no log has, for a number of ranks.
        config_file: the yaml config of runs whose log has none.
    """

    add_keys: Sequence[Callable[..., Any]] = ()
    trainer: Any = None
    coco: Sequence[Sequence[str]] = ()
    image_size: Optional[tuple[int, int]] = None
    num_instances: Optional[int] = None
    lazy_job: Optional[Callable[[int], Job]] = None
    config_file: str = ""


def rebuild(run: LoggedRun, help: Help) -> tuple[Job, DeviceModel, list[str]]:
    """Make a run's job again.

    Returns:
        The job, its card, and a line for each thing that is not known.

    Raises:
        ConfigError: something of the job is neither in the log nor here.
    """
    (card, _), release, ranks = card_of(run), release_of(run), run.ranks or 1
    is_current = release is not None and release >= (2, 0)  # before, gradients were in each forward
    device = DeviceModel.load(card.device if card else "cuda")
    device = replace(device, card_is_known=bool(run.gpus), release_is_known=is_current)
    said = run.gpus[0] if run.gpus else "a card that the log does not name"
    assumed = [] if card else [f"{said}, taken for a current CUDA card"]
    if run.is_lazy and help.lazy_job is not None:
        return help.lazy_job(ranks), device, assumed
    cfg = DefaultTrainer.auto_scale_workers(_config_of(run, help, assumed), ranks)
    cfg.defrost()
    for dataset in help.coco:
        register_coco(*dataset)
    if help.coco and not {name for name, _, _ in help.coco} & {*cfg.DATASETS.TRAIN}:
        cfg.DATASETS.TRAIN = (help.coco[0][0],)
    cfg.DATASETS.TRAIN = cfg.DATASETS.TRAIN or ("of_the_log",)
    trainer = help.trainer or _trainer_of(run, assumed)
    if help.trainer is None and (name := cfg.MODEL.META_ARCHITECTURE) not in META_ARCH_REGISTRY:
        code = "--project MODULE:FUNCTION --trainer MODULE:CLASS"
        raise ConfigError(f"the model {name} is not Detectron2's: name its code, {code}")
    _describe_datasets(cfg)
    mean = run.objects / run.images if run.objects and run.images else None
    sizes = {"image_size": help.image_size, "num_instances": help.num_instances}
    return Job.from_trainer(trainer, cfg, ranks, mean_instances=mean, **sizes), device, assumed


def _config_of(run: LoggedRun, help: Help, assumed: list[str]) -> CfgNode:
    if run.is_lazy:
        raise ConfigError(f"it is a LazyConfig: name its file, --config-file {run.config_file}")
    text, file = run.config_text, run.zoo_config
    if help.config_file and not text:
        file = help.config_file
        assumed.append(f"with the config {file}, as the log has none")
    if not text and not file:
        raise ConfigError("the log has no config: give its OUTPUT_DIR, or a file by --config-file")
    cfg = load_cfg(file, (), help.add_keys)
    values = dict(leaves(yaml.load(text, SafeLoader))) if text else run.overrides
    values, here = {**values, **_HERE}, dict(leaves(cfg))
    if left_out := [key for key in values if key not in here]:
        assumed.append(f"without keys that this Detectron2 does not have: {', '.join(left_out)}")
    for key in values.keys() & here:
        kind, value = type(here[key]), values[key]
        if kind in (tuple, list):  # early releases had one number for MIN_SIZE_TRAIN
            value = kind(value if isinstance(value, (tuple, list)) else [value])
        here[key] = value
    return with_settings(cfg, here)


def _describe_datasets(cfg: CfgNode) -> None:
    """Give datasets that are not registered the metadata that mappers and models ask for.

    The mapper's name in INPUT.DATASET_MAPPER_NAME, which MaskFormer and its successors have, tells
    whether images have label images, segments or objects. Classes have numbers for names.
    """
    mapper = cfg.INPUT.get("DATASET_MAPPER_NAME", "")
    kind = next((kind for word, kind in _KINDS.items() if word in mapper), "coco")
    classes = [f"class {i}" for i in range(min(cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES, _MOST_CLASSES))]
    ids = {i: i for i in range(len(classes))}
    for name in {*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST} - {*data.DatasetCatalog}:
        data.MetadataCatalog.pop(name, None)  # another run may have had a dataset of this name
        data.MetadataCatalog.get(name).set(
            evaluator_type=kind,
            ignore_label=cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE,
            stuff_classes=classes,
            thing_classes=classes,
            stuff_dataset_id_to_contiguous_id=ids,
            thing_dataset_id_to_contiguous_id=ids,
        )


def _trainer_of(run: LoggedRun, assumed: list[str]) -> Any:
    """Detectron2's trainer, with the augmentations that the log has printed."""
    if not (text := run.augmentations):
        return DefaultTrainer
    try:
        parsed = ast.parse(text[text.index("[") : text.rindex("]") + 1], mode="eval").body
        augmentations = [_made(call) for call in getattr(parsed, "elts", [])]
        T.AugmentationList(augmentations)  # raises if one is none
    except (AssertionError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        instead = "the augmentations are those of the config"
        assumed.append(f"{instead}; those of the log cannot be made: {text:.99}")
        return DefaultTrainer

    class AsLogged(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: CfgNode) -> Any:
            mapper = data.DatasetMapper(cfg, is_train=True, augmentations=augmentations)
            return data.build_detection_train_loader(cfg, mapper=mapper)

    return AsLogged


def _made(node: ast.expr) -> Any:
    """The value of a printed augmentation: Detectron2's classes with literals, nothing else."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    kind = getattr(T, name, None)
    if not (isinstance(kind, type) and issubclass(kind, (T.Augmentation, T.Transform))):
        raise ValueError(f"{name or ast.unparse(node.func)} is not Detectron2's")
    keywords = {k.arg or "": _made(k.value) for k in node.keywords}
    return kind(*map(_made, node.args), **keywords)


def card_of(run: LoggedRun) -> tuple[Optional[Card], Optional[float]]:
    """A run's card, if it is known, and its nominal memory in GB."""
    name = run.gpus[0] if run.gpus else ""
    sizes = re.findall(r"(?i)\b(\d+) ?GB", name)  # of a slice of a card, the last
    total = run.oom.total_mib if run.oom else None
    said = float(sizes[-1]) if sizes else total and round(total / 1024)
    card = find_card(name, said)
    return card, card.memory_gb if card and said is None else said


def release_of(run: LoggedRun) -> Optional[tuple[int, int]]:
    """The release of PyTorch, such as (1, 13); None if the log does not say."""
    found = re.match(r"(\d+)\.(\d+)", run.torch)
    return (int(found[1]), int(found[2])) if found else None
