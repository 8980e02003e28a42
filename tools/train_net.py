#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""The command ``d2-memfit train`` from a checkout, with its trainer.

tools/train_net.py --config-file FILE [--num-gpus N] [--resume] [--eval-only] [KEY VALUE ...]
torchrun --nproc-per-node N tools/train_net.py --config-file FILE
"""

from d2_memfit.common.startup import ignore_warnings_of_libraries

ignore_warnings_of_libraries()

from d2_memfit.cli.train import Trainer, main
from d2_memfit.cli.train import run_script as run

__all__ = ["Trainer", "main", "run"]

if __name__ == "__main__":
    run()
