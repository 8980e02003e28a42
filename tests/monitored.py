# Copyright (c) the d2_memfit developers.
"""Small training jobs whose memory the monitoring hooks look at, in a process of their own.

    python monitored.py leaky
    python monitored.py healthy COINS_FOLDER OUTPUT_DIR OPTIONS

"leaky" trains for 500 iterations with a loader whose worker keeps 1 MiB in each. "healthy" trains a
real detector, with evaluations and checkpoints. OPTIONS are those of
:func:`train_detector`, in JSON.
"""

import itertools
import json
import logging
import random
import sys
from pathlib import Path

import numpy as np
import torch
from detectron2.data import DatasetCatalog, DatasetMapper, build_detection_train_loader
from detectron2.data import transforms as T
from detectron2.data.samplers import TrainingSampler
from detectron2.engine import hooks
from detectron2.evaluation import COCOEvaluator
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, MemfitTrainer
from d2_memfit.data import register_coco
from d2_memfit.engine import launch
from d2_memfit.engine.hooks import LeakDetector

__all__ = ["batches", "cheap_trainer", "make_trainer"]


def make_trainer(loader, family="proposal_network", fpn=False, **kwargs):
    model = tiny_model(tiny_cfg(family, fpn=fpn))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return AccumulatingTrainer(model, loader, optimizer, **kwargs)


def batches(seed=0):
    """Of images of all sizes."""
    rng = random.Random(seed)
    sizes = [32, 48, 64, 96, 128]
    pool = [
        images(1, i, size=rng.choice(sizes), num_instances=rng.randint(1, 9)) for i in range(16)
    ]
    while True:
        yield rng.choice(pool) + rng.choice(pool)


class Linear(torch.nn.Linear):
    def forward(self, batch):
        return {"loss": super().forward(batch).square().mean()}


def cheap_trainer(loader=None):
    """Of iterations that take a millisecond."""
    model = Linear(8, 2)
    loader = itertools.repeat(torch.ones(2, 8)) if loader is None else loader
    return AccumulatingTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-4))


class Keeping(torch.utils.data.IterableDataset):
    def __iter__(self):
        kept = []
        for i in itertools.count():
            kept.append(np.ones(2**17))
            yield torch.full((2, 8), i % 7 / 7)


SMALLEST, LARGEST = 48, 128  # shorter side of the images, in pixels
# Largest size of the images, by the part of the run that is done: 0 to 1.
GROWTH = {
    "none": lambda done: LARGEST,
    "half": lambda done: SMALLEST + (LARGEST - SMALLEST) * min(1, 2 * done),
    "stairs": lambda done: SMALLEST + (LARGEST - SMALLEST) * int(6 * done) / 6,
    # A few of the first are as large as any, and then they grow.
    "late": lambda done: LARGEST if done < 0.1 and int(700 * done) % 7 == 0 else 64 + 64 * done,
}


class SizedMapper(DatasetMapper):
    """Resizes each image to the size in its dataset dict."""

    def __call__(self, dataset_dict):
        resize = T.ResizeShortestEdge(dataset_dict["size"], 10**4)
        self.augmentations = T.AugmentationList([resize, T.RandomFlip()])
        return super().__call__(dataset_dict)


class Trainer(MemfitTrainer):
    growth = "none"

    @classmethod
    def build_train_loader(cls, cfg):
        rng = random.Random(cfg.SEED)
        pool = DatasetCatalog.get("coins_train")
        num = cfg.SOLVER.MAX_ITER * cfg.SOLVER.IMS_PER_BATCH
        limits = [int(GROWTH[cls.growth](i / num)) for i in range(num)]
        sizes = [rng.randint(limit * 2 // 3, limit) for limit in limits]
        return build_detection_train_loader(
            [{**rng.choice(pool), "size": size} for size in sizes],
            mapper=SizedMapper(cfg, is_train=True),
            sampler=TrainingSampler(num, shuffle=False),
            total_batch_size=cfg.SOLVER.IMS_PER_BATCH,
            num_workers=cfg.DATALOADER.NUM_WORKERS,
        )

    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_folder=None):
        return COCOEvaluator(dataset_name, output_dir=cfg.OUTPUT_DIR, use_fast_impl=False)


def train_detector(
    coins,
    output_dir,
    window,
    family="faster_rcnn",
    growth="none",
    num_workers=0,
    sharing="file_descriptor",
    eval_period=50,
    seed=1,
    kept_kib=0,
    num_iterations=500,
):
    """A real run, whose images grow as GROWTH says; ``kept_kib`` are kept in each iteration."""
    torch.set_flush_denormal(True)  # as in conftest.py
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy(sharing)
    for split in ("train", "val"):
        register_coco(f"coins_{split}", str(coins / f"{split}.json"), str(coins / split))
    cfg = tiny_cfg(family, fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ("coins_val",)
    cfg.DATALOADER.NUM_WORKERS = num_workers
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.BASE_LR = 1e-4
    cfg.SOLVER.MAX_ITER = num_iterations
    cfg.SOLVER.CHECKPOINT_PERIOD = 100
    cfg.TEST.EVAL_PERIOD = eval_period
    cfg.MEMFIT.MONITOR.LEAK_WINDOW = window
    cfg.OUTPUT_DIR = str(output_dir)
    cfg.SEED = seed
    Trainer.growth = growth
    trainer = Trainer(cfg)
    kept = []
    if kept_kib:
        keep = hooks.CallbackHook(after_step=lambda _: kept.append(np.ones(kept_kib * 2**7)))
        trainer.register_hooks([keep])
    trainer.train()


def main(kind, *args):
    if kind == "leaky":
        logging.basicConfig()
        loader = torch.utils.data.DataLoader(Keeping(), batch_size=None, num_workers=1)
        trainer = cheap_trainer(loader)
        trainer.register_hooks([LeakDetector()])
        trainer.train(0, 500)
    else:
        coins, output_dir, options = args
        options = json.loads(options)
        args = (Path(coins), Path(output_dir), options.pop("window"))
        num_ranks = options.pop("num_ranks", 1)
        launch(_train_on_rank, num_ranks, dist_url="auto", args=(args, options))


def _train_on_rank(args, options):
    train_detector(*args, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
