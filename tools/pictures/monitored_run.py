# Copyright (c) the d2_memfit developers.
"""A short run on Coins whose budget is too small for all of an iteration's images at once.

    python -m pictures.monitored_run FOLDER        in tools/

Memory is reported after every iteration; `tools/train_net.py` writes metrics every 20. A process
of its own, because the kernel's limit stays.
"""

import os
import sys
from pathlib import Path

from detectron2.data.datasets import register_coco_instances
from detectron2.engine import HookBase, default_argument_parser, default_setup
from detectron2.engine.hooks import PeriodicWriter

from d2_memfit import MemfitTrainer
from d2_memfit.config import load_cfg
from d2_memfit.engine.window import cutter

CONFIG = Path(__file__).resolve().parents[2] / "projects" / "Coins/configs/mask_rcnn_coins.yaml"
IMAGES = 32
BUDGET_GB = 1.5  # 32 images at a time need more, and 8 do not
ITERATIONS = 10


class Trainer(MemfitTrainer):
    def build_hooks(self) -> list[HookBase]:
        hooks: list[HookBase] = super().build_hooks()
        writers = [hook for hook in hooks if isinstance(hook, PeriodicWriter)]
        return [h for h in hooks if h not in writers] + [PeriodicWriter(self.build_writers(), 1)]


def train(folder: Path) -> None:
    """Train into ``folder``/run, with the photographs of ``folder``/coins."""
    os.chdir(folder)  # so that the page has short names of images
    register_coco_instances("coins_train", {}, "coins/train.json", "coins/train")
    cutter.GROW_AFTER = 4
    options = {
        "SOLVER.IMS_PER_BATCH": IMAGES,
        "SOLVER.ACCUMULATION_STEPS": 1,
        "SOLVER.MAX_ITER": ITERATIONS,
        "DATASETS.TEST": (),
        "DATALOADER.NUM_WORKERS": 0,
        "MODEL.DEVICE": "cpu",
        "MEMFIT.BUDGET_GB": BUDGET_GB,
        "MEMFIT.OOM.POLICY": "split",
        "MEMFIT.MONITOR.PERIOD": 1,
        "MEMFIT.MONITOR.SNAPSHOT_ITER": ITERATIONS - 1,
        "OUTPUT_DIR": "run",
    }
    cfg = load_cfg(str(CONFIG), [text for option in options.items() for text in option])
    default_setup(cfg, default_argument_parser().parse_args([]))
    Trainer(cfg).train()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
