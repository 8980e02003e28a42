# Copyright (c) the d2_memfit developers.
"""COCO's evaluation in parts of some hundred images, with the same results."""

import io
import json
import logging
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from functools import wraps
from typing import Any, Callable, Optional

import numpy as np
from detectron2.config import CfgNode
from detectron2.evaluation import COCOEvaluator, coco_evaluation
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from detectron2.utils.logger import log_first_n
from pycocotools.cocoeval import COCOeval

from ..common.patching import replaced_functions
from ..errors import ConfigError
from .coco_matches import CocoMatches
from .spilled_predictions import SpilledPredictions, save_as_list

__all__ = ["coco_evaluators"]

_IMAGES = 200  # images in a part; pycocotools takes about 0.2 MB for one with 100 objects
_TASKS = {"segmentation": "segm", "keypoints": "keypoints"}


@contextmanager
def coco_evaluators(cfg: CfgNode) -> Iterator[None]:
    """While open, extend ``COCOEvaluator`` in two ways.

    - It numbers annotations from 1 if their ids are not unique integers above 0.
      ``COCOeval.evaluateImg`` writes the id of the matched annotation, or 0 for no match. ``COCO``
      finds annotations by their ids. So an object with the id 0 would count as missed.
    - With MEMFIT.EVALUATION.ON_DISK it keeps predictions in a file, and evaluates them in parts.
      Derived classes do so as well. Results and files are the same as with the official COCO API.
      Box proposals, and what subclasses evaluate themselves, are evaluated as a list.
    """
    methods: dict[str, Any] = {"evaluate": _numbering}
    if cfg.MEMFIT.EVALUATION.ON_DISK:
        methods = {
            "reset": lambda _: _reset,
            "evaluate": lambda original: _numbering(_evaluate(original)),
        }
    # Projects make and derive evaluators themselves, in build_evaluator or test.
    with replaced_functions([COCOEvaluator], methods):
        yield


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


def _reset(self: Any) -> None:
    if self._output_dir:
        PathManager.mkdirs(self._output_dir)
    is_local = self._output_dir and os.path.isdir(self._output_dir)
    self._predictions = SpilledPredictions(self._output_dir if is_local else None)


def _evaluate(original: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(self: Any, img_ids: Optional[list[Any]] = None) -> Any:
        spilled = self._predictions
        is_other = not isinstance(spilled, SpilledPredictions) or "proposals" in spilled.keys
        of_ranks = [(is_other, len(spilled))]
        if self._distributed:
            of_ranks = comm.all_gather(of_ranks[0])
        if any(other for other, _ in of_ranks) or not any(number for _, number in of_ranks):
            self._predictions = list(spilled)
            return original(self, img_ids)
        if self._distributed:
            spilled = spilled.gathered()
            if not comm.is_main_process():
                return {}
        self._results = _results(self, spilled, img_ids)
        return deepcopy(self._results)

    return evaluate


def _results(self: Any, spilled: SpilledPredictions, img_ids: Any) -> OrderedDict[str, Any]:
    """Evaluate like ``COCOEvaluator._eval_predictions``, with the same log messages."""
    results: OrderedDict[str, Any] = OrderedDict()
    if self._output_dir:
        with PathManager.open(
            os.path.join(self._output_dir, "instances_predictions.pth"), "wb"
        ) as f:
            save_as_list(spilled, f)
    if "instances" not in spilled.keys:
        return results
    self._logger.info("Preparing results for COCO format ...")
    instances_of = _in_coco_format(self._metadata)
    if self._output_dir:
        file_path = os.path.join(self._output_dir, "coco_instances_results.json")
        self._logger.info("Saving results to %s", file_path)
        with PathManager.open(file_path, "w") as f:
            f.write("[")
            for number, instance in enumerate(i for p in spilled for i in instances_of(p)):
                f.write((", " if number else "") + json.dumps(instance))
            f.write("]")
    if not self._do_evaluation:
        self._logger.info("Annotations are not available for evaluation.")
        return results
    self._logger.info("Evaluating predictions with official COCO API, in parts...")
    tasks = self._tasks or {"bbox", *(_TASKS[key] for key in _TASKS.keys() & spilled.keys)}
    for task in sorted(tasks):
        assert task in {"bbox", "segm", "keypoints"}, f"Got unknown task: {task}!"
        coco_eval = _in_parts(self, spilled, instances_of, task, img_ids)
        class_names = self._metadata.get("thing_classes")
        results[task] = self._derive_coco_results(coco_eval, task, class_names=class_names)
    return results


def _in_coco_format(metadata: Any) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """A function that returns a prediction's objects with the dataset's category ids."""
    to_contiguous = metadata.get("thing_dataset_id_to_contiguous_id")
    if to_contiguous is None:
        return lambda prediction: prediction["instances"]
    to_dataset = {v: k for k, v in to_contiguous.items()}
    assert sorted(to_dataset) == list(range(len(to_contiguous)))

    def instances_of(prediction: dict[str, Any]) -> list[dict[str, Any]]:
        for instance in prediction["instances"]:
            category_id = instance["category_id"]
            assert category_id in to_dataset, (
                f"A prediction has class={category_id}, but the dataset only has "
                f"{len(to_dataset)} classes and predicted class id should be in "
                f"[0, {len(to_dataset) - 1}]."
            )
            instance["category_id"] = to_dataset[category_id]
        return list(prediction["instances"])

    return instances_of


def _in_parts(
    self: Any,
    spilled: SpilledPredictions,
    instances_of: Callable[[dict[str, Any]], list[dict[str, Any]]],
    task: str,
    img_ids: Any,
) -> Optional[COCOeval]:
    """Evaluate like Detectron2's ``_evaluate_predictions_on_coco``; None if nothing is found."""
    first = next((i for p in spilled for i in instances_of(p)), None)
    if first is None:
        return None
    known = set(self._coco_api.getImgIds())
    of_image = defaultdict(list)
    for index, image_id in enumerate(spilled.image_ids):
        of_image[image_id].append(index)
    wanted = sorted(known if img_ids is None else set(img_ids))
    matches = CocoMatches()
    for begin in range(0, len(wanted), _IMAGES):
        part = wanted[begin : begin + _IMAGES]
        indices = sorted(index for image_id in part for index in of_image[image_id])
        if begin == 0:  # pycocotools checks here that the dataset has these images
            indices += [
                index for image_id in of_image.keys() - known for index in of_image[image_id]
            ]
        instances = [i for index in indices for i in instances_of(spilled[index])]
        # pycocotools needs at least one object. imgIds excludes objects of other images.
        coco_eval = _part(self, instances or [deepcopy(first)], task, part)
        matches.add(coco_eval)
    whole_class = COCOeval
    if self._max_dets_per_image[2] != 100:
        whole_class = coco_evaluation.COCOevalMaxDets
    whole = whole_class(iouType=task)
    whole.params = coco_eval.params
    whole.eval = matches.accumulated(coco_eval.params)
    whole.summarize()
    return whole


def _part(self: Any, instances: list[dict[str, Any]], task: str, img_ids: list[Any]) -> COCOeval:
    if task == "segm":
        for instance in instances:
            instance.pop("bbox", None)  # otherwise the area of the box would count
    with redirect_stdout(io.StringIO()):
        coco_eval = COCOeval(self._coco_api, self._coco_api.loadRes(instances), task)
        params = coco_eval.params
        params.imgIds = img_ids
        if task != "keypoints":
            params.maxDets = self._max_dets_per_image
        else:
            if self._kpt_oks_sigmas:
                params.kpt_oks_sigmas = np.array(self._kpt_oks_sigmas)
            number = len(instances[0]["keypoints"]) // 3
            if number != len(params.kpt_oks_sigmas):
                raise ConfigError(
                    f"TEST.KEYPOINT_OKS_SIGMAS must have {number} numbers, one for each keypoint"
                )
        coco_eval.evaluate()
    return coco_eval
