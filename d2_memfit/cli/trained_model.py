# Copyright (c) the d2_memfit developers.
"""The commands draw, predict and export, which use a trained model."""

import argparse
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from numpy.typing import NDArray
from omegaconf import DictConfig
from PIL import Image

from ..common.checks import check_int, check_positive_int
from ..common.files import check_outputs, output_file
from ..data import (
    check_classes,
    check_coco_file,
    complaints_about_images,
    look_at_images,
    register_coco,
)
from ..engine import evaluating, usable_device
from ..errors import ConfigError
from ..inference import (
    SUFFIXES,
    FilePrediction,
    Predictor,
    draw,
    export,
    find_files,
    import_visualizer,
    metadata_of,
    outputs_of,
    read_images,
    weights_of,
)
from ..memory import device_memory, use_expandable_segments
from .job_options import files_read, is_lazy, job_of, load_any_config
from .next_step import after_draw, after_export, after_predict

__all__ = ["draw_images", "export_model", "predict_files"]

_INCOMPLETE = 3  # exit status
_PICTURES = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
_COLUMNS = 2  # of a picture of several images

Say = Callable[[str], None]


def draw_images(args: argparse.Namespace, say: Say) -> None:
    """Run the command draw: predictions in the first images of a dataset, in one picture."""
    if not args.coco:
        raise ConfigError("--coco: name the images to be drawn, --coco NAME JSON IMAGE_DIR")
    check_positive_int("--num-images", args.num_images)
    if args.output is not None and args.output.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--output {args.output} must end in {', '.join(_PICTURES)}")
    name, json_file, image_dir = args.coco[0]
    register_coco(name, json_file, image_dir)
    file = check_coco_file(name, json_file, image_dir, for_training=False)
    import_visualizer()
    predictor, cfg = _predictor(args, [], say)
    if not is_lazy(args.config_file):  # which does not say how many classes it has
        check_classes(cfg, file)
    pictures = []
    for number, d in enumerate(DatasetCatalog.get(name)[: args.num_images]):
        (image,) = read_images(Path(d["file_name"]), predictor.image_format)
        found = [result for result in predictor(image, number) if result["score"] > args.min_score]
        pictures.append(draw(image, predictor.image_format, found, MetadataCatalog.get(name)))
    with output_file(args.output) as f:
        Image.fromarray(_side_by_side(pictures)).save(f, _PICTURES[args.output.suffix.lower()])
    print(f"Written: {args.output}\n{after_draw(args)}")


def _side_by_side(pictures: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    height, width = (max(p.shape[i] for p in pictures) for i in (0, 1))
    rows = math.ceil(len(pictures) / _COLUMNS)
    result = np.zeros((rows * height, min(_COLUMNS, len(pictures)) * width, 3), dtype=np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // _COLUMNS * height, i % _COLUMNS * width
        result[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return result


def predict_files(args: argparse.Namespace, opts: Sequence[str], say: Say) -> None:
    """Run the command predict.

    Args:
        opts: KEY VALUE pairs of the budget, which come before the user's.
    """
    files = find_files(_input(args))
    if args.tile_size is not None:
        check_int("--tile-size", args.tile_size, at_least=16)
    import_visualizer()
    if opts:
        use_expandable_segments()  # before anything queries the GPU
    own = ["OUTPUT_DIR", str(args.output), "MEMFIT.OOM.POLICY", "split"]
    predictor, cfg = _predictor(args, [*opts, *own], say, files)
    # A LazyConfig does not say how many classes it has.
    checked = None if is_lazy(args.config_file) else cfg
    metadata = _metadata_of_coco(args.coco, checked) if args.coco else metadata_of(cfg)
    looked = look_at_images(list(map(str, files)), [(None, None)] * len(files))
    if "deep" in looked:
        say(dict(complaints_about_images(looked, len(files)))["deep"])
    prediction = FilePrediction(predictor, args.output, metadata, args.min_score)
    recovery = logging.getLogger("d2_memfit.engine.recovery")
    level = recovery.level
    recovery.setLevel(logging.CRITICAL)  # it has a line for each image that does not fit
    try:
        with evaluating(cfg, predictor.model):
            prediction.run(files, say)
    finally:
        recovery.setLevel(level)
    device = next(predictor.model.parameters()).device
    number = len(prediction.images)
    print(
        f"{number} images, {prediction.seconds / max(number, 1):.3f} s each, "
        f"{device_memory(device).peak_allocated_bytes / 2**30:.2f} GB peak on the {device.type}\n"
        f"Written: {args.output / 'pictures'}, {args.output / 'coco_instances_results.json'}, "
        f"{args.output / 'images.json'} (the images of these results)"
    )
    if prediction.done:
        print(after_predict(args, prediction.done[0]))
    left = len(files) - len(prediction.done)
    if left:
        say(f"{left} of {len(files)} files were left out, or ended early")
        sys.exit(_INCOMPLETE)


def export_model(args: argparse.Namespace, say: Say) -> None:
    """Run the command export."""
    if args.output.suffix not in SUFFIXES:
        raise ConfigError(f"--output {args.output} must end in {' or '.join(SUFFIXES)}")
    file = _input(args)
    predictor, _ = _predictor(args, ["MODEL.DEVICE", "cpu"], say)
    image = next(read_images(file, predictor.image_format))
    compared = export(predictor.model, predictor.inputs(image)["image"].float(), args.output)
    print(f"Written: {args.output} ({compared})\n{after_export(args.output)}")


def _input(args: argparse.Namespace) -> Path:
    if args.input is None:
        raise ConfigError("--input: name an image; predict takes a video or a folder, too")
    path: Path = args.input
    return path


def _predictor(
    args: argparse.Namespace, opts: Sequence[str], say: Say, files: Sequence[Path] = ()
) -> tuple[Predictor, Any]:
    """The predictor of a command, and its job's config.

    Before the model is built, the outputs are checked. Those of predict are for ``files``.
    """
    # As a training's, --coco would set its classes and schedule.
    without_data = argparse.Namespace(**{**vars(args), "coco": []})
    config = load_any_config(without_data, opts, say)
    if isinstance(config, DictConfig):
        config.train.device = usable_device(config.train.device)
    else:
        config.MODEL.DEVICE = usable_device(config.MODEL.DEVICE)
    job = job_of(without_data, config)
    configured = job.cfg.MODEL.WEIGHTS
    given = args.weights or (configured if "MODEL.WEIGHTS" in args.opts[::2] else None)
    beside = args.config_file
    if args.command == "draw" and "OUTPUT_DIR" in args.opts[::2]:
        beside = str(Path(job.cfg.OUTPUT_DIR) / "config.yaml")
    weights = weights_of(beside, configured, given)
    say(f"weights: {weights}")
    args.output = args.output or Path(job.cfg.OUTPUT_DIR) / "predictions.png"  # of draw
    outputs = outputs_of(args.output, files) if files else [args.output]
    check_outputs(outputs, [weights, *files, *files_read(args)])
    return Predictor(config, job, weights, getattr(args, "tile_size", None)), job.cfg


def _metadata_of_coco(coco: Sequence[Sequence[str]], cfg: Optional[CfgNode]) -> Metadata:
    """Metadata of the first dataset of ``--coco``, whose classes must be those of the config."""
    name, json_file, image_dir = coco[0]
    register_coco(name, json_file, image_dir)
    file = check_coco_file(name, json_file, None, for_training=False)
    if cfg is not None:
        check_classes(cfg, file)
    DatasetCatalog.get(name)  # which reads the names of its classes
    return MetadataCatalog.get(name)
