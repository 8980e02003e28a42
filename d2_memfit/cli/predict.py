# Copyright (c) the d2_memfit developers.
"""The command predict, which uses a trained model."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Union
from unittest.mock import patch

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from ..common import GB
from ..common.checks import Check, whole
from ..common.errors import ConfigError
from ..common.files import check_outputs
from ..data.coco_file import check_coco_file
from ..data.registration import register_coco
from ..data.settings import check_classes
from ..engine.evaluating import evaluating
from ..engine.oom_log import logger as recovery
from ..job import Job
from ..memory import device_memory, use_expandable_segments
from ..predict.files import FilePrediction, metadata_of, outputs_of
from ..predict.images import find_files
from ..predict.predictor import Predictor, weights_of
from .command_line import files_read
from .options import is_lazy, load_config, trainer_of
from .screen import say, show


def predict(args: Namespace) -> None:
    Check("a number from 0 to 1", lambda value: 0 <= value <= 1)("--min-score", args.min_score)
    if args.tile_size is not None:
        whole(16)("--tile-size", args.tile_size)
    dataset, files = None, []
    if args.coco:
        name, json_file, image_dir = args.coco[0]
        register_coco(name, json_file, image_dir)
        folder = None if args.input else image_dir
        dataset = check_coco_file(name, json_file, folder, for_training=False)
        images = DatasetCatalog.get(name)  # which reads the names of its classes
        files = [*dict.fromkeys(Path(d["file_name"]) for d in images)]  # one may be listed twice
    if args.input is not None:
        files = find_files(args.input)
    if not files:
        raise ConfigError(
            "--input: name an image, a video or a folder of them. Or leave it out and name images "
            "with --coco NAME JSON IMAGE_DIR"
        )
    if args.card or args.budget:
        use_expandable_segments()  # before anything queries the GPU
    predictor, cfg = _predictor(args, files)
    if dataset is not None and not is_lazy(args.config_file):  # which has no number of classes
        check_classes(cfg, dataset)
    metadata = metadata_of(cfg) if dataset is None else MetadataCatalog.get(dataset.name)
    prediction = FilePrediction(predictor, args.output, metadata, args.min_score)
    # It logs a line for each image that does not fit.
    with patch.object(recovery, "disabled", True), evaluating(cfg, predictor.model):
        failures = prediction.run(files, say)
    device = next(predictor.model.parameters()).device
    number = len(prediction.images)
    show(
        f"{number} images, {prediction.seconds / max(number, 1):.3f} s each, "
        f"{device_memory(device).peak_allocated_bytes / GB:.2f} GB peak on the {device.type}\n"
        f"Written: {args.output / 'pictures'}, {args.output / 'coco_instances_results.json'}, "
        f"{args.output / 'images.json'} (the images of these results)"
    )
    if failures:
        say(f"{failures} of {len(files)} files were skipped or not finished")
        sys.exit(3)


def _predictor(args: Namespace, files: Sequence[Path]) -> tuple[Predictor, CfgNode]:
    """Make the predictor of images and videos, and the config of its job; check the outputs."""
    # In training, --coco sets classes and schedule. Here the config has them already.
    without_data = Namespace(**{**vars(args), "coco": []})
    own = {"OUTPUT_DIR": str(args.output), "MEMFIT.OOM.POLICY": "split"}
    config = load_config(without_data, runs=True, own=own)
    job = Job.from_any(config, trainer_of(args), ranks=1)
    weights = job.cfg.MODEL.WEIGHTS
    given = args.weights or (weights if "MODEL.WEIGHTS" in args.opts[::2] else None)
    weights = weights_of(args.config_file, weights, given)
    say(f"weights: {weights}")
    inputs: list[Union[str, Path]] = [weights, *files, *files_read(args)]
    check_outputs(outputs_of(args.output, files), inputs, args.overwrite)
    return Predictor(config, job, weights, args.tile_size), job.cfg
