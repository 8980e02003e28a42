#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Find objects in images of any size, and write them in COCO's results format.

    projects/TiledImages/predict.py --config-file FILE --input IMAGE ... --output RESULTS.json
        [--opts KEY VALUE ...]

``image_id`` is the image's place in the list, from 1, and ``category_id`` is the model's, from 0.
"""

from d2_memfit.common.library_warnings import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import argparse

from detectron2.modeling import build_model
from detectron2.utils.logger import setup_logger
from tiled_images import TiledPredictor, load_tiled_cfg

from d2_memfit.common.files import check_outputs
from d2_memfit.config.settings import Settings
from d2_memfit.engine.evaluating import recovering_inference
from d2_memfit.errors import exit_on_error
from d2_memfit.memory import enforce_budget
from d2_memfit.predict.files import results_file
from d2_memfit.predict.predictor import load_whole_model
from d2_memfit.predict.tiles import to_coco
from d2_memfit.techniques.registry import ready_to_evaluate


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, metavar="FILE")
    parser.add_argument("--input", nargs="+", required=True, metavar="IMAGE")
    parser.add_argument("--output", required=True, metavar="RESULTS.json")
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE")
    args = parser.parse_args()
    setup_logger(name="d2_memfit")
    settings = Settings.from_cfg(load_tiled_cfg(args.config_file, args.opts), trains=False)
    cfg = settings.cfg
    check_outputs([args.output], [args.config_file, cfg.MODEL.WEIGHTS, *args.input])
    enforce_budget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE)
    model = build_model(cfg).eval()
    load_whole_model(model, cfg.MODEL.WEIGHTS)
    predictor = TiledPredictor(cfg, model)
    with (
        ready_to_evaluate(model, cfg),
        recovering_inference(model, settings.recovery),
        results_file(args.output) as write,
    ):
        for image_id, file_name in enumerate(args.input, start=1):
            write(to_coco(found, image_id) for found in predictor.detect(file_name))
    print(f"Written: {args.output}")


if __name__ == "__main__":
    main()
