#!/usr/bin/env python3
"""Find objects in images of any size, and write them in COCO's format of results.

    projects/TiledImages/predict.py --config-file FILE --input IMAGE ... --output RESULTS.json
        [--opts KEY VALUE ...]

``image_id`` is the image's place behind --input, from 1; ``category_id`` is the model's, from 0.
"""

import argparse

from detectron2.modeling import build_model
from detectron2.utils.logger import setup_logger
from tiled_images import CocoResultsWriter, TiledPredictor, load_tiled_cfg, to_coco

from d2_memfit.engine import MemfitCheckpointer, RecoveryOptions, recovering_inference
from d2_memfit.errors import exit_on_error
from d2_memfit.memory import enforce_budget, use_expandable_segments
from d2_memfit.techniques import ready_to_evaluate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True, metavar="FILE")
    parser.add_argument("--input", required=True, nargs="+", metavar="IMAGE")
    parser.add_argument("--output", required=True, metavar="RESULTS.json")
    parser.add_argument("--opts", nargs=argparse.REMAINDER, default=[], metavar="KEY VALUE")
    return parser.parse_args()


@exit_on_error
def main() -> None:
    args = parse_args()
    setup_logger(name="d2_memfit")
    cfg = load_tiled_cfg(args.config_file, args.opts)
    if cfg.MEMFIT.BUDGET_GB is not None:
        use_expandable_segments()  # before anything asks the GPU
    enforce_budget(cfg.MEMFIT.BUDGET_GB, cfg.MODEL.DEVICE)
    model = build_model(cfg).eval()
    MemfitCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    predictor = TiledPredictor(cfg, model)
    with (
        ready_to_evaluate(model, cfg),
        recovering_inference(model, RecoveryOptions.from_cfg(cfg)),
        CocoResultsWriter(args.output) as results,
    ):
        for image_id, file_name in enumerate(args.input, start=1):
            for detection in predictor.detect(file_name):
                results.write(to_coco(detection, image_id))


if __name__ == "__main__":
    main()
