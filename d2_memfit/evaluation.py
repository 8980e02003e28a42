# Copyright (c) the d2_memfit developers.
"""The evaluator of a dataset, which counts objects that COCO's API would miss."""

import inspect
import io
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout
from functools import wraps
from typing import Any, Callable, Optional

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    CityscapesSemSegEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    SemSegEvaluator,
)
from detectron2.utils.logger import log_first_n
from detectron2.utils.registry import locate
from omegaconf import ListConfig

from . import compat
from .common.patching import replaced_functions

__all__ = [
    "build_coco_evaluator",
    "build_evaluator",
    "unique_annotation_ids",
    "use_available_implementation",
]


def build_evaluator(
    cfg: CfgNode, dataset_name: str, output_folder: Optional[str] = None
) -> DatasetEvaluator:
    """Build the evaluator that Detectron2's ``tools/train_net.py`` uses for the dataset's type.

    Args:
        cfg: gives OUTPUT_DIR and TEST.KEYPOINT_OKS_SIGMAS.
        dataset_name: a registered dataset.
        output_folder: folder for predictions; the default is OUTPUT_DIR/inference.

    Raises:
        NotImplementedError: Detectron2 has no evaluator for this type.
    """
    folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
    sigmas = cfg.TEST.KEYPOINT_OKS_SIGMAS
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    evaluators = {
        "coco": lambda: [build_coco_evaluator(dataset_name, folder, sigmas)],
        "coco_panoptic_seg": lambda: [
            SemSegEvaluator(dataset_name, distributed=True, output_dir=folder),
            build_coco_evaluator(dataset_name, folder, sigmas),
            COCOPanopticEvaluator(dataset_name, folder),
        ],
        "sem_seg": lambda: [SemSegEvaluator(dataset_name, distributed=True, output_dir=folder)],
        "cityscapes_instance": lambda: [CityscapesInstanceEvaluator(dataset_name)],
        "cityscapes_sem_seg": lambda: [CityscapesSemSegEvaluator(dataset_name)],
        "pascal_voc": lambda: [PascalVOCDetectionEvaluator(dataset_name)],
        "lvis": lambda: [LVISEvaluator(dataset_name, output_dir=folder)],
    }
    if kind not in evaluators:
        raise NotImplementedError(
            f"no evaluator for the dataset {dataset_name!r} with evaluator_type {kind!r}: "
            "override build_evaluator of the trainer"
        )
    made = evaluators[kind]()
    return made[0] if len(made) == 1 else DatasetEvaluators(made)


def build_coco_evaluator(
    dataset_name: str, output_folder: str, kpt_oks_sigmas: Sequence[float] = ()
) -> COCOEvaluator:
    """Build Detectron2's evaluator, with its fast implementation if it is compiled.

    Args:
        dataset_name: a registered dataset in COCO format.
        output_folder: folder for predictions.
        kpt_oks_sigmas: one per keypoint; needed for keypoints other than COCO's 17.
    """
    return COCOEvaluator(
        dataset_name,
        output_dir=output_folder,
        use_fast_impl=compat.has_compiled_ops(),
        kpt_oks_sigmas=kpt_oks_sigmas,
    )


def use_available_implementation(evaluator: Any) -> None:
    """Choose the available COCO implementation in a LazyConfig.

    Args:
        evaluator: a ``LazyCall``, or a list of them. ``COCOEvaluator`` calls without a choice of
            implementation get the available one.
    """
    for call in evaluator if isinstance(evaluator, ListConfig) else [evaluator]:
        target = locate(call._target_) if isinstance(call._target_, str) else call._target_
        if inspect.isclass(target) and issubclass(target, COCOEvaluator):
            call.setdefault("use_fast_impl", compat.has_compiled_ops())


def unique_annotation_ids() -> AbstractContextManager[None]:
    """While open, ``COCOEvaluator`` numbers annotations from 1 if pycocotools needs that.

    ``COCOeval.evaluateImg`` writes the id of the matched annotation, or 0 for no match. ``COCO``
    finds annotations by their ids. So an object with the id 0 would count as missed.
    """
    # Projects make and derive evaluators themselves, in build_evaluator or test.
    return replaced_functions([COCOEvaluator], {"evaluate": _numbering})


def _numbering(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluate)
    def evaluate_numbered(self: Any, *args: Any, **kwargs: Any) -> Any:
        annotations = self._coco_api.dataset.get("annotations", [])
        ids = [a["id"] for a in annotations]
        if len({i for i in ids if isinstance(i, int) and i > 0}) < len(ids):
            log_first_n(
                logging.WARNING,
                f"{self._metadata.get('json_file')}: annotation ids are not different integers "
                "from 1 up, which pycocotools needs. The evaluation uses new numbers",
                key="message",
            )
            for number, annotation in enumerate(annotations, 1):
                annotation["id"] = number
            with redirect_stdout(io.StringIO()):
                self._coco_api.createIndex()
        return evaluate(self, *args, **kwargs)

    return evaluate_numbered
