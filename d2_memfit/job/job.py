# Copyright (c) the d2_memfit developers.
"""The description of a training job, used by trainers, plans and commands."""

import copy
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.utils import comm
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from ..common.side_work import no_information
from ..config.lazy import cfg_of_lazy
from ..config.load import get_cfg, merge_memfit, with_settings
from ..config.settings import Precision, checked_cfg
from ..techniques.registry import apply_techniques
from .given import GivenBatches
from .parts import GivenParts, LazyParts, LossFn, Parts, TrainerParts
from .worst_batch import MappedBatches

__all__ = ["Batches", "Job"]

Batches = Union[GivenBatches, MappedBatches]


class Job:
    """A training job: model, optimizer, loaders, batch geometry, precision and budget.

    It is checked once, and does not change. Ways to make one::

        Job.from_cfg(cfg)                 # Detectron2's own defaults
        Job.from_trainer(Trainer, cfg)    # the project's build_model, build_optimizer, ...
        Job.from_lazy(cfg)                # a LazyConfig
        Job(model=..., optimizer=...)     # pieces, for your own loop

    Args:
        model: makes the model.
        optimizer: makes the optimizer of that model.
        train_loader, test_loader: make the loaders of a rank.
        images_per_batch: images in a batch of a rank's training loader; estimates have that many
            of ``batch``.
        accumulation_steps: batches per optimizer step.
        micro_batch_size: images in one forward on each rank; None for the loader's batch.
        ranks: processes that train together; None for those of this run.
        device: as MODEL.DEVICE.
        amp_dtype: dtype of mixed precision, "float16" or "bfloat16"; None for float32.
        max_iter: number of optimizer steps.
        output_dir: folder for records and plans.
        memfit: other keys of the node MEMFIT, nested, such as ``{"budget_gb": 6}``.
        batch: the largest batch, for estimates; see :meth:`from_cfg`.
        loss_fn: called as ``loss_fn(model, batch)`` in place of ``model(batch)``, in training and
            in estimates. Modules that it calls are parts of the model, so that they are counted.

    Attributes:
        cfg: the frozen yacs config, with all keys of d2_memfit, as :func:`checked_cfg` makes it.
            For a LazyConfig or pieces, its keys hold the corresponding values.
        ranks: processes that train together.
        parts: makes model, optimizer and loaders.

    Raises:
        ConfigError: a value cannot work.
    """

    cfg: CfgNode
    ranks: int
    parts: Parts

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], Optimizer],
        train_loader: Optional[Callable[[], Any]] = None,
        test_loader: Optional[Callable[[], Any]] = None,
        images_per_batch: int = 1,
        accumulation_steps: int = 1,
        micro_batch_size: Optional[int] = None,
        ranks: Optional[int] = None,
        device: str = "cuda",
        amp_dtype: Optional[str] = None,
        max_iter: int = 1,
        output_dir: str = "output",
        memfit: Optional[Mapping[str, Any]] = None,
        batch: Any = None,
        loss_fn: Optional[LossFn] = None,
    ) -> None:
        ranks = comm.get_world_size() if ranks is None else ranks
        cfg = get_cfg()
        cfg.SOLVER.IMS_PER_BATCH = images_per_batch * ranks
        cfg.SOLVER.ACCUMULATION_STEPS = accumulation_steps
        cfg.SOLVER.MAX_ITER = max_iter
        cfg.SOLVER.AMP.ENABLED = amp_dtype is not None
        cfg.MEMFIT.AMP_DTYPE = amp_dtype or cfg.MEMFIT.AMP_DTYPE
        cfg.MEMFIT.MICRO_BATCH = micro_batch_size
        merge_memfit(cfg, memfit or {})
        cfg.MODEL.DEVICE, cfg.OUTPUT_DIR = device, output_dir
        cfg.DATASETS.TEST = () if test_loader is None else ("test_loader",)
        parts = GivenParts(model, optimizer, train_loader, test_loader, loss_fn)
        self._describe(parts, cfg, ranks, batch=batch)

    @classmethod
    def from_cfg(cls, cfg: CfgNode, ranks: Optional[int] = None, **batch: Any) -> "Job":
        """Make the job of Detectron2's ``DefaultTrainer``.

        Args:
            ranks: processes that train together; None for those of this run.
            batch: the largest batch of the job: ``batch=`` images, see
                :class:`~d2_memfit.job.given.GivenBatches`. Or values in place of the datasets':
                ``image_size=`` (height, width) of the largest image file, ``num_instances=`` of the
                most crowded image, ``mean_instances=`` of all images.
        """
        return cls.from_trainer(DefaultTrainer, cfg, ranks, **batch)

    @classmethod
    def from_trainer(
        cls, trainer: Any, cfg: CfgNode, ranks: Optional[int] = None, **batch: Any
    ) -> "Job":
        """Make the job of a trainer class, from its ``build_*`` methods and ``test``.

        Args:
            trainer: ``DefaultTrainer``, or a class with such class methods.
            cfg, ranks, batch: as for :meth:`from_cfg`.
        """
        return cls.__new__(cls)._describe(TrainerParts(cfg, trainer), cfg, ranks, **batch)

    @classmethod
    def from_lazy(cls, cfg: DictConfig, ranks: Optional[int] = None, **batch: Any) -> "Job":
        """Make the job of a LazyConfig, like Detectron2's ``lazyconfig_train_net.py``.

        Args:
            cfg: with the nodes model, optimizer, dataloader and train.
            ranks, batch: as for :meth:`from_cfg`.
        """
        return cls.__new__(cls)._describe(LazyParts(cfg), cfg_of_lazy(cfg), ranks, **batch)

    @classmethod
    def from_any(
        cls,
        config: Union["Job", CfgNode, DictConfig],
        trainer: Any = None,
        ranks: Optional[int] = None,
        **batch: Any,
    ) -> "Job":
        """Make the job of a config of either kind; a job is returned as it is."""
        if isinstance(config, Job):
            given = [trainer, *batch.values()]
            if ranks not in (None, config.ranks) or any(value is not None for value in given):
                raise TypeError("a Job has its ranks, trainer and batch already: make it with them")
            return config
        if isinstance(config, DictConfig):
            if trainer is not None:
                raise TypeError("a LazyConfig has no trainer class: its nodes say what is built")
            return cls.from_lazy(config, ranks, **batch)
        return cls.from_trainer(trainer or DefaultTrainer, config, ranks, **batch)

    def _describe(self, parts: Parts, cfg: CfgNode, ranks: Optional[int], **given: Any) -> "Job":
        self.ranks = comm.get_world_size() if ranks is None else ranks
        self.cfg = checked_cfg(cfg, self.ranks)
        self.parts = parts.with_cfg(self.cfg, {})
        self._given = given
        return self

    def with_settings(self, settings: Mapping[str, Any]) -> "Job":
        """The same job with other values for some config keys.

        Raises:
            ConfigError: the job has no such key.
        """
        job = copy.copy(self)
        job.cfg = with_settings(self.cfg, settings)
        job.parts = self.parts.with_cfg(job.cfg, settings)
        if not all(key.startswith(("MEMFIT.", "SOLVER.")) for key in settings):
            vars(job).pop("batches", None)  # the mapper may be another
        return job

    @property
    def images_per_batch(self) -> int:
        """Images in a batch of one rank's loader."""
        return self.cfg.SOLVER.IMS_PER_BATCH // self.ranks

    @property
    def window(self) -> int:
        """Images of one rank per optimizer step."""
        return self.images_per_batch * self.cfg.SOLVER.ACCUMULATION_STEPS

    @property
    def largest_micro_batch(self) -> int:
        """The most images in one forward on each rank."""
        return min(self.cfg.MEMFIT.MICRO_BATCH or self.images_per_batch, self.window)

    @property
    def budget_gb(self) -> Optional[float]:
        """Device memory that each rank may use, in GB of 2^30 bytes."""
        return self.cfg.MEMFIT.BUDGET_GB

    @property
    def family(self) -> str:
        """Hash of the model's config, without its weights; "" for a job made from pieces."""
        if isinstance(self.parts, TrainerParts):
            config = with_settings(self.cfg, {"MODEL.DEVICE": "", "MODEL.WEIGHTS": ""}).MODEL.dump()
        elif isinstance(self.parts, LazyParts):
            config = re.sub(r" at 0x[0-9a-f]+", "", str(self.parts.cfg.model))
        else:
            return ""
        return hashlib.sha256(config.encode()).hexdigest()

    @property
    def is_pretrained(self) -> bool:
        """Whether the model begins with trained weights, or may: a job of pieces loads its own."""
        return bool(self.cfg.MODEL.WEIGHTS) or isinstance(self.parts, GivenParts)

    def precision(self, device: Optional[str] = None) -> Precision:
        """Number formats on MODEL.DEVICE or another device."""
        return Precision.from_cfg(self.cfg, device)

    def build_model(self, device: Optional[str] = None) -> nn.Module:
        """Build the model with its techniques, on MODEL.DEVICE or another device."""
        with no_information():
            model = self.parts.build_model(self.cfg.MODEL.DEVICE if device is None else device)
        return apply_techniques("model", model, self.cfg, announce=False)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Build the optimizer with its techniques; ZeRO needs all ranks."""
        optimizer = self.parts.build_optimizer(model)
        return apply_techniques("optimizer", optimizer, self.cfg, announce=False)

    @cached_property
    def batches(self) -> Batches:
        """The maker of the largest batches, from the given batch or with the job's own mapper."""
        given = {key: value for key, value in self._given.items() if value is not None}
        batch = given.pop("batch", None)
        if batch is not None:
            return GivenBatches(batch)
        return MappedBatches(
            self.parts.build_train_loader,
            self.parts.test_loaders(),
            groups_by_aspect=self.cfg.DATALOADER.ASPECT_RATIO_GROUPING,
            with_labels=self.cfg.MODEL.META_ARCHITECTURE in ("PanopticFPN", "SemanticSegmentor"),
            instances=given.pop("num_instances", None),
            **given,
        )

    def training_batch(
        self, num_images: Optional[int] = None, batches: Optional[Batches] = None
    ) -> Any:
        """The largest micro-batch, or one with a given number of images.

        Args:
            batches: those to take it from, in place of the job's.
        """
        num_images = self.largest_micro_batch if num_images is None else num_images
        accumulates = self.window > self.images_per_batch
        crosses_batches = accumulates and self.images_per_batch % self.largest_micro_batch > 0
        return (batches or self.batches).training(num_images, crosses_batches)
