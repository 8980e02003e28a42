#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Train or evaluate a detector of the transformers library.

projects/Transformers/train_transformers.py --config-file FILE [--coco NAME JSON IMAGE_DIR ...]
    [--card SIZE] [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
"""

from d2_memfit.common.startup import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

from d2_transformers import Trainer, add_transformers_config

from d2_memfit.cli.train import run_script

if __name__ == "__main__":
    run_script(Trainer, [add_transformers_config], __doc__)
