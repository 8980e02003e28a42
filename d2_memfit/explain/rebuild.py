# Copyright (c) the d2_memfit developers.
"""The job of a logged run, made again from what its log says."""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Optional

from detectron2.config import CfgNode
from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.data import transforms as T
from detectron2.engine import DefaultTrainer
from detectron2.modeling import META_ARCH_REGISTRY

from ..config.cards import Card, cards_named, find_card
from ..config.load import load_cfg
from ..data import register_coco
from ..errors import ConfigError
from ..job import Job
from ..planner.device import DeviceModel
from .datasets import describe_datasets
from .records import LoggedRun

__all__ = ["Help", "Rebuilt", "card_of", "rebuild"]

# Values of the log that are of its machine.
_HERE = {"OUTPUT_DIR": "./output", "MODEL.DEVICE": "cuda"}
_NO_LIMIT = 10_000  # pixels of a longest side
_MOST_IMAGES, _MOST_DATASETS = 256, 16  # on a GPU, and of a split: more is a mistake


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
    """

    add_keys: Sequence[Callable[..., Any]] = ()
    trainer: Any = None
    coco: Sequence[Sequence[str]] = ()
    image_size: Optional[tuple[int, int]] = None
    num_instances: Optional[int] = None
    lazy_job: Optional[Callable[[int], Job]] = None


@dataclass(frozen=True)
class Rebuilt:
    """A run's job on its card.

    Attributes:
        pytorch: the release, such as (1, 13); None if the log does not say.
        left_out: keys of the log's config that this Detectron2 does not have.
        assumed: a line for each thing that is not known, with what was taken for it.
    """

    job: Job
    device: DeviceModel
    pytorch: Optional[tuple[int, int]]
    left_out: list[str]
    assumed: list[str]


def rebuild(run: LoggedRun, help: Help) -> Rebuilt:
    """Make a run's job again.

    Raises:
        ConfigError: something of the job is neither in the log nor here.
    """
    device, assumed = _device_of(run)
    release = _release(run.software.get("torch"))
    ranks = run.ranks or 1
    if run.is_lazy and help.lazy_job is not None:
        return Rebuilt(help.lazy_job(ranks), device, release, [], assumed)
    cfg, left_out = _config_of(run, help.add_keys)
    cfg = DefaultTrainer.auto_scale_workers(cfg, ranks)
    cfg.defrost()
    images = cfg.SOLVER.IMS_PER_BATCH
    is_number = isinstance(images, int) and images > 0
    if is_number and images // ranks > _MOST_IMAGES:
        raise ConfigError(f"no GPU has {images // ranks} images: SOLVER.IMS_PER_BATCH {images}")
    if is_number and images % ranks:
        cfg.SOLVER.IMS_PER_BATCH = max(images // ranks, 1) * ranks
        per_rank = cfg.SOLVER.IMS_PER_BATCH // ranks
        assumed.append(
            f"SOLVER.IMS_PER_BATCH {images} does not divide by {ranks} ranks: {per_rank} each"
        )
    for dataset in help.coco:
        register_coco(*dataset)
    if help.coco and not {name for name, _, _ in help.coco} & {*cfg.DATASETS.TRAIN}:
        cfg.DATASETS.TRAIN = (help.coco[0][0],)
    cfg.DATASETS.TRAIN = cfg.DATASETS.TRAIN or ("of_the_log",)
    for split in ("TRAIN", "TEST"):
        cfg.DATASETS[split] = tuple(map(str, cfg.DATASETS[split][:_MOST_DATASETS]))
    trainer = help.trainer
    if trainer is None:
        trainer, lines = _trainer_of(run)
        assumed += lines
    name = cfg.MODEL.META_ARCHITECTURE
    if help.trainer is None and name not in META_ARCH_REGISTRY:
        raise ConfigError(f"the model {name} is not Detectron2's: its code is not here")
    describe_datasets(cfg)
    mean = run.objects / run.images if run.objects and run.images else None
    job = Job.from_trainer(
        trainer,
        cfg,
        ranks,
        image_size=help.image_size,
        num_instances=help.num_instances,
        mean_instances=mean,
    )
    return Rebuilt(job, device, release, left_out, assumed)


def _config_of(run: LoggedRun, add_keys: Sequence[Callable[..., Any]]) -> tuple[CfgNode, list[str]]:
    """The config, and the keys that are not in it because nothing here has them."""
    if run.is_lazy:
        raise ConfigError(
            "it is a LazyConfig, whose code is not in a log: name its file, --config-file "
            f"{run.config_file or 'FILE.py'}"
        )
    cfg = load_cfg(run.zoo_config or "", (), add_keys)
    values: dict[str, Any] = dict(run.overrides)
    if run.config_text:
        values = dict(_leaves(run.config()))
    elif not run.zoo_config:
        raise ConfigError("the log has no config: give config.yaml of its OUTPUT_DIR, too")
    left_out = [key for key, value in {**values, **_HERE}.items() if not _set(cfg, key, value)]
    return cfg, left_out


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "VERSION":
            yield prefix + str(key), value


def _set(cfg: CfgNode, key: str, value: Any) -> bool:
    """Set a key, with the type that it has here; False if there is no such key."""
    *path, name = key.split(".")
    for part in path:
        cfg = cfg.get(part)
        if not isinstance(cfg, CfgNode):
            return False
    if name not in cfg or isinstance(cfg[name], CfgNode):
        return False
    cfg[name] = _typed(value, cfg[name])
    return True


def _typed(value: Any, like: Any) -> Any:
    """A value with the type of another, such as (800,) for 800 or "(800,)", if it can have it."""
    if isinstance(value, str) and not isinstance(like, (str, type(None))):
        with suppress(SyntaxError, ValueError):
            value = ast.literal_eval(value)
    if isinstance(like, (tuple, list)):
        several = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
        return type(like)(several)
    return value


def _trainer_of(run: LoggedRun) -> tuple[Any, list[str]]:
    """Detectron2's trainer, with the augmentations that the log has printed."""
    if not run.augmentations:
        return DefaultTrainer, []
    try:
        augmentations = [_made(call) for call in _calls_in(run.augmentations)]
        T.AugmentationList(augmentations)  # raises if one is none
        lines = [line for a in augmentations if (line := _limit(a))]
    except (AssertionError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return DefaultTrainer, [
            "the augmentations are those of the config; those of the log cannot be made: "
            f"{run.augmentations:.99}"
        ]

    class AsLogged(DefaultTrainer):
        @classmethod
        def build_train_loader(cls, cfg: CfgNode) -> Any:
            mapper = DatasetMapper(cfg, is_train=True, augmentations=augmentations)
            return build_detection_train_loader(cfg, mapper=mapper)

    return AsLogged, lines


def _limit(augmentation: Any) -> str:
    """Limit the longest side of resized images if nothing does; returns what is assumed."""
    if not isinstance(augmentation, T.ResizeShortestEdge) or augmentation.max_size < _NO_LIMIT:
        return ""
    augmentation.max_size = 2 * max(augmentation.short_edge_length)
    return f"no image is longer than {augmentation.max_size} pixels, twice its shorter side"


def _calls_in(text: str) -> list[ast.expr]:
    parsed = ast.parse(text[text.index("[") : text.rindex("]") + 1], mode="eval").body
    return parsed.elts if isinstance(parsed, ast.List) else []


def _made(node: ast.expr) -> Any:
    """The value of a printed augmentation: Detectron2's classes with literals, nothing else."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    kind = getattr(T, name, None)
    if not (isinstance(kind, type) and issubclass(kind, (T.Augmentation, T.Transform))):
        raise ValueError(f"{name or ast.unparse(node.func)} is not Detectron2's")
    return kind(
        *(_made(arg) for arg in node.args), **{k.arg or "": _made(k.value) for k in node.keywords}
    )


def card_of(run: LoggedRun) -> tuple[Optional[Card], Optional[float]]:
    """A run's card, if it is known, and its nominal memory in GB."""
    name = run.gpus[0] if run.gpus else ""
    sizes = re.findall(r"(?i)\b(\d+) ?GB", name)  # of a slice of a card, the last
    total = run.oom.total if run.oom else None
    said = float(sizes[-1]) if sizes else total and round(total / 1024)
    if said is None:  # then a size that holds the peak
        peak = (run.peak_mib or 0) / 1024
        said = next((c.memory_gb for c in cards_named(name) if c.memory_gb > peak), None)
    return find_card(name, said), said


def _device_of(run: LoggedRun) -> tuple[DeviceModel, list[str]]:
    card, _ = card_of(run)
    device = DeviceModel.load(card.device if card else "cuda")
    lines = []
    if card is None:
        said = run.gpus[0] if run.gpus else "a card that the log does not name"
        lines.append(f"{said}, taken for a current CUDA card")
        device = replace(device, card_is_known=bool(run.gpus))
    release = _release(run.software.get("torch"))
    if release is None:
        lines.append("the log does not say which PyTorch ran: 2.0 or later")
        return replace(device, release_is_known=False), lines
    return device.with_pytorch(release), lines


def _release(version: Optional[str]) -> Optional[tuple[int, int]]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None
