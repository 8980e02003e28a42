# Copyright (c) the d2_memfit developers.
"""Runs that are interrupted and resumed, and what they have trained on."""

import os

from detectron2.data import DatasetCatalog
from detectron2.engine import hooks
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from tiny import parameters, tiny_cfg

from d2_memfit import MemfitTrainer
from d2_memfit.data.registration import register_coco


class Trainer(MemfitTrainer):
    @classmethod
    def test(cls, cfg, model, evaluators=None):
        return {}


def coins_cfg(output_dir, family="mask_rcnn", **keys):
    """A tiny detector that learns Coins, from 3 batches of 2 images each, flipped and cropped."""
    cfg = tiny_cfg(family, fpn=False)
    cfg.DATASETS.TRAIN = ("coins_train",)
    cfg.DATASETS.TEST = ()
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.CROP.ENABLED = family != "mask_rcnn"  # polygons are cropped by shapely
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.ACCUMULATION_STEPS = 3
    cfg.SOLVER.MAX_ITER = 12
    cfg.SOLVER.WARMUP_ITERS = 3
    cfg.MEMFIT.NORMALIZERS.POLICY = "off"  # the check of losses takes longer than all else
    cfg.OUTPUT_DIR = str(output_dir)
    if keys.get("DATALOADER.SAMPLER_TRAIN") == "RandomSubsetTrainingSampler":
        cfg.DATALOADER.RANDOM_SUBSET_RATIO = 0.5  # Detectron2 has no such key
    cfg.merge_from_list([x for item in keys.items() for x in item])
    return cfg


def train_on_rank(rank, folder, *args):
    """:func:`train` in a process of :class:`Ranks`, whose losses are those of all ranks."""
    register_coins(folder)
    return train(*args)


def register_coins(folder):
    for split in ("train", "val"):
        if f"coins_{split}" not in DatasetCatalog:
            register_coco(f"coins_{split}", str(folder / f"{split}.json"), str(folder / split))


def train(cfg, start, end, trainer_class=Trainer):
    """Iterations ``start`` to ``end`` of a run, in a process that drew other numbers before.

    Returns:
        dict: "images" of each iteration, as (image_id, sum of pixels), its total "losses", and
        the "weights" at the end.
    """
    seed_all_rng(start + comm.get_rank())
    cfg = cfg.clone()
    cfg.SOLVER.CHECKPOINT_PERIOD = end
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume=start > 0)
    assert trainer.start_iter == start
    images, losses, seen = [], [], []

    def see(model, args):
        seen.extend((i["image_id"], int(i["image"].sum())) for i in args[0])

    def end_iteration(trainer):
        images.append(list(dict.fromkeys(seen)))  # some were run again
        seen.clear()
        losses.append(trainer.storage.latest()["total_loss"][0] if comm.is_main_process() else 0)
        if trainer.iter + 1 == end < cfg.SOLVER.MAX_ITER:
            raise KeyboardInterrupt  # nothing is done after the checkpoint

    trainer.model.register_forward_pre_hook(see)
    trainer.register_hooks([hooks.CallbackHook(after_step=end_iteration)])
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert end < cfg.SOLVER.MAX_ITER
    return {"images": images, "losses": losses, "weights": parameters(trainer.model)}


def is_there(group):
    """Whether a process of a group is alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
