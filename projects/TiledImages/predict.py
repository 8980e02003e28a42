#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Find objects in images of any size, and write them in COCO's results format.

    projects/TiledImages/predict.py --config-file FILE --coco JSON IMAGE_DIR --output RESULTS.json
        [--opts KEY VALUE ...]
    projects/TiledImages/predict.py --config-file FILE --input IMAGE ... --output RESULTS.json

With --coco, images, image ids and category ids are the dataset's; annotations are not needed. With
--input, ``image_id`` is the image's place in the list, from 1, and ``category_id`` is the model's,
from 0.
"""

from d2_memfit.common.library_warnings import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import argparse
import json
import os
import shlex

from detectron2.modeling import build_model
from detectron2.utils.logger import setup_logger
from tiled_images import CorruptImageError, TiledPredictor, load_tiled_cfg, warn_left_out

from d2_memfit.common.files import check_outputs
from d2_memfit.config.settings import Settings
from d2_memfit.data import check_coco_file
from d2_memfit.engine.evaluating import recovering_inference
from d2_memfit.errors import exit_on_error
from d2_memfit.inference import CocoResultsWriter, load_whole_model, to_coco
from d2_memfit.memory import enforce_budget, use_expandable_segments
from d2_memfit.techniques import ready_to_evaluate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, metavar="FILE")
    images = parser.add_mutually_exclusive_group(required=True)
    images.add_argument("--coco", nargs=2, metavar=("JSON", "IMAGE_DIR"))
    images.add_argument("--input", nargs="+", metavar="IMAGE")
    parser.add_argument("--output", required=True, metavar="RESULTS.json")
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE")
    return parser.parse_args()


def images_and_categories(args: argparse.Namespace) -> tuple[dict[int, str], list[int]]:
    """Files by image id, and ids of the model's categories; none if they stay."""
    if args.input:
        return dict(enumerate(args.input, start=1)), []
    json_file, folder = args.coco
    check_coco_file("of --coco", json_file, folder, for_training=False)
    with open(json_file, encoding="utf-8") as file:
        coco = json.load(file)
    files = {image["id"]: os.path.join(folder, image["file_name"]) for image in coco["images"]}
    return files, sorted(category["id"] for category in coco["categories"])


@exit_on_error
def main() -> None:
    args = parse_args()
    setup_logger(name="d2_memfit")
    cfg = load_tiled_cfg(args.config_file, args.opts)
    files, categories = images_and_categories(args)
    inputs = [args.config_file, cfg.MODEL.WEIGHTS, *files.values(), *(args.coco or [])]
    check_outputs([args.output], inputs)
    if cfg.MEMFIT.BUDGET_GB is not None or cfg.MEMFIT.PRESET:
        use_expandable_segments()  # before anything queries the GPU
    settings = Settings.from_cfg(cfg, trains=False)
    cfg = settings.cfg
    enforce_budget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE)
    model = build_model(cfg).eval()
    load_whole_model(model, cfg.MODEL.WEIGHTS)
    predictor = TiledPredictor(cfg, model)
    with (
        ready_to_evaluate(model, cfg),
        recovering_inference(model, settings.recovery),
        CocoResultsWriter.open(args.output) as results,
    ):
        for image_id, file_name in files.items():
            found = (to_coco(d, image_id, categories) for d in predictor.detect(file_name))
            try:
                results.write(found)
            except CorruptImageError as e:
                if not cfg.TILES.SKIP_CORRUPT:
                    raise
                warn_left_out(e)
    words = ["d2-memfit", "predict", "--project", "tiled_images:add_tiled_config"]
    words += ["--config-file", args.config_file, "--weights", cfg.MODEL.WEIGHTS]
    words += ["--tile-size", str(cfg.TILES.SIZE), "--input", "IMAGE"]
    words += ["--output", "predictions", "INPUT.MIN_SIZE_TEST", "0"]
    path = f"PYTHONPATH={shlex.quote(os.path.dirname(__file__))}:$PYTHONPATH"
    print(f"Written: {args.output}\nNext, draw objects in images:\n  {path} {shlex.join(words)}")


if __name__ == "__main__":
    main()
