#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Find objects in images of any size, and write them in COCO's results format.

    projects/TiledImages/predict.py --config-file FILE --input IMAGE ... --output RESULTS.json
        [--opts KEY VALUE ...]

``image_id`` is the image's place in the list, from 1, and ``category_id`` is the model's, from 0.
"""

from d2_memfit.common.startup import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

import argparse
from typing import Any

import torch
from detectron2.data import build_detection_test_loader
from detectron2.utils.logger import setup_logger
from tiled_images import TileMapper, TileMerger, Trainer, add_tiled_config, open_image, tiles_of

from d2_memfit.common.checks import usable_device
from d2_memfit.common.errors import exit_on_error
from d2_memfit.common.files import check_outputs
from d2_memfit.config.load import load_cfg
from d2_memfit.engine.evaluating import evaluating
from d2_memfit.predict.files import results_file
from d2_memfit.predict.predictor import load_whole_model


def image_of(file_name: str, image_id: int) -> dict[str, Any]:
    with open_image(file_name) as file:
        size = {"height": file.height, "width": file.width}
    return {"file_name": file_name, "image_id": image_id, **size}


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
    cfg = load_cfg(args.config_file, args.opts, [add_tiled_config])
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE)
    check_outputs([args.output], [args.config_file, cfg.MODEL.WEIGHTS, *args.input])
    model, merge = Trainer.build_model(cfg).eval(), TileMerger()
    images = [image_of(file, number) for number, file in enumerate(args.input, start=1)]
    tiles = tiles_of(images, cfg.TILES.SIZE, cfg.TILES.OVERLAP)
    load_whole_model(model, cfg.MODEL.WEIGHTS)
    mapper, workers = TileMapper(cfg, is_train=False), cfg.DATALOADER.NUM_WORKERS
    with evaluating(cfg, model), torch.no_grad(), results_file(args.output) as write:
        for inputs in build_detection_test_loader(tiles, mapper=mapper, num_workers=workers):
            write(merge(inputs[0], model(inputs)[0]))
    print(f"Written: {args.output}")


if __name__ == "__main__":
    main()
