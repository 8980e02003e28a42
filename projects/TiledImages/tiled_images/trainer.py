# Copyright (c) the d2_memfit developers.
"""Detectron2's default trainer for tiles."""

from typing import Any, Optional

from detectron2.config import CfgNode
from detectron2.data import get_detection_dataset_dicts
from detectron2.data.samplers import InferenceSampler
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import COCOEvaluator
from torch import nn
from torch.utils.data import DataLoader

from d2_memfit.compat import has_compiled_ops

from .mapper import build_tiled_train_loader
from .predictor import TiledPredictor

__all__ = ["TiledTrainer"]

_MAX_DETECTIONS = 10_000  # detections per image that count. COCO's 100 is for images of one tile


class TiledTrainer(DefaultTrainer):
    """Trains on tiles and evaluates whole images: ``class Trainer(MemfitMixin, TiledTrainer)``."""

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> DataLoader[Any]:
        return build_tiled_train_loader(cfg)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> DataLoader[Any]:
        """Build a loader of dicts of whole images, whose tiles the predictor reads."""
        dicts = get_detection_dataset_dicts(dataset_name, filter_empty=False)
        return DataLoader(dicts, sampler=InferenceSampler(len(dicts)), collate_fn=list)

    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: Optional[str] = None
    ) -> COCOEvaluator:
        folder = output_folder or f"{cfg.OUTPUT_DIR}/inference"
        return _TiledEvaluator(
            dataset_name,
            output_dir=folder,
            use_fast_impl=has_compiled_ops(),
            max_dets_per_image=_MAX_DETECTIONS,
        )

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module, evaluators: Any = None) -> Any:
        return super().test(cfg, TiledPredictor(cfg, model), evaluators)


class _TiledEvaluator(COCOEvaluator):
    """Detectron2's evaluator for results that are in COCO's format already."""

    def process(self, inputs: list[Any], outputs: list[Any]) -> None:
        for image, output in zip(inputs, outputs):
            self._predictions.append(
                {"image_id": image["image_id"], "instances": output["instances"]}
            )
