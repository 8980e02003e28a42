# Copyright (c) the d2_memfit developers.
"""Training: Detectron2's trainer with AdamW, an average of the weights, and ``save_pretrained``."""

import os
from collections import defaultdict
from fnmatch import fnmatchcase
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import (
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn
from torch.optim import AdamW, Optimizer

from d2_memfit.cli.train import Trainer as MemfitTrainer
from d2_memfit.common.compat import without_ddp
from d2_memfit.common.errors import ConfigError
from d2_memfit.engine.checkpoint import MemfitCheckpointer

from .average import AverageWeights
from .data import build_mapper

__all__ = ["Trainer"]


class Trainer(MemfitTrainer):
    """A trainer with this project's mapper, AdamW and clipping of the whole gradient."""

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_detection_train_loader(cfg, mapper=build_mapper(cfg, is_train=True))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        mapper = build_mapper(cfg, is_train=False)
        return build_detection_test_loader(cfg, dataset_name, mapper=mapper)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Optimizer:
        """Build AdamW with TRANSFORMERS.LR_MULTIPLIERS.

        Norms, biases and one-dimensional embeddings have no weight decay. SOLVER.CLIP_GRADIENTS
        clips the norm of the whole gradient, as in DETR.

        Raises:
            ConfigError: a pattern matches nothing, or another kind of clipping is configured.
        """
        factors = dict(cfg.TRANSFORMERS.LR_MULTIPLIERS)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for pattern in factors:
            if not any(fnmatchcase(name, pattern) for name, _ in trained):
                raise ConfigError(f"TRANSFORMERS.LR_MULTIPLIERS: no parameter matches {pattern!r}")
        groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
        for name, parameter in trained:
            found = (f for pattern, f in factors.items() if fnmatchcase(name, pattern))
            factor = next(found, 1.0)
            decay = cfg.SOLVER.WEIGHT_DECAY if parameter.dim() > 1 else 0.0
            groups[factor, decay].append(parameter)
        options = [
            {"params": parameters, "lr": cfg.SOLVER.BASE_LR * factor, "weight_decay": decay}
            for (factor, decay), parameters in groups.items()
        ]
        if not cfg.SOLVER.CLIP_GRADIENTS.ENABLED:
            return AdamW(options)
        clip = cfg.SOLVER.CLIP_GRADIENTS
        if clip.CLIP_TYPE not in ("norm", "full_model"):
            raise ConfigError(
                "SOLVER.CLIP_GRADIENTS.CLIP_TYPE must be 'norm', that of all parameters together, "
                f"got {clip.CLIP_TYPE!r}"
            )
        return _ClippingAdamW(options, clip.CLIP_VALUE)

    def build_hooks(self) -> list[HookBase]:
        hooks: list[HookBase] = super().build_hooks()
        # The average is updated before hooks that save and evaluate.
        return [AverageWeights(), *hooks] if self.cfg.TRANSFORMERS.EMA_DECAY else hooks

    def after_train(self) -> None:
        """After the last iteration, write a folder for transformers' ``from_pretrained``."""
        super().after_train()
        if comm.is_main_process() and self.iter + 1 >= self.max_iter:
            names = MetadataCatalog.get(self.cfg.DATASETS.TRAIN[0]).get("thing_classes")
            detector: Any = without_ddp(self.model)
            detector.save_pretrained(os.path.join(self.cfg.OUTPUT_DIR, "pretrained"), names)

    def resume_or_load(self, resume: bool = True) -> Any:
        weights = self.cfg.TRANSFORMERS.WEIGHTS
        if weights and not (resume and self.checkpointer.has_checkpoint()):
            detector: Any = without_ddp(self.model)
            detector.load_pretrained(weights)
        return super().resume_or_load(resume)

    @classmethod
    def load_weights(cls, cfg: CfgNode, model: nn.Module, resume: bool) -> None:
        if not cfg.TRANSFORMERS.WEIGHTS:
            super().load_weights(cfg, model, resume)
            return
        detector: Any = model
        detector.load_pretrained(cfg.TRANSFORMERS.WEIGHTS)
        if resume or cfg.MODEL.WEIGHTS:
            checkpointer = MemfitCheckpointer(model, cfg.OUTPUT_DIR)
            checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=resume)


class _ClippingAdamW(AdamW):
    """AdamW that clips the norm of the whole gradient before each step."""

    def __init__(self, groups: list[dict[str, Any]], max_norm: float) -> None:
        super().__init__(groups)
        self._max_norm = max_norm

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self._max_norm)
        return super().step(closure)
