#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Train a detector on tiles of images, and evaluate it on whole images.

projects/TiledImages/train_tiles.py --config-file FILE --coco NAME JSON IMAGE_DIR ...
    [--card SIZE] [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
"""

from d2_memfit.common.startup import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

from tiled_images import Trainer, add_tiled_config

from d2_memfit.cli.train import run_script

if __name__ == "__main__":
    run_script(Trainer, [add_tiled_config], __doc__)
