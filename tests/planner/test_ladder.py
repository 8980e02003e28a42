# Copyright (c) the d2_memfit developers.
"""More memory is never worse, whatever the dry runs say."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from tiny import sized, tiny_cfg, tiny_model

from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner import ladder as ladder_module
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.ladder import Ladder, Rung
from d2_memfit.techniques.registry import TECHNIQUES, TIERS, get_technique

CUDA = DeviceModel.load("cuda")
CASE = (320, 480), 10
R18 = ("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64)
BLOCKS = [f"backbone.{i}" for i in range(4)] + [f"head.{i}" for i in range(3)]


class Session:
    """Stands for a model with blocks in its backbone and its head."""

    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False))


class Invented:
    """A job with invented needs, which are above those of no other rung."""

    seed = 0
    evaluates = least_bytes = 0
    evaluation = None
    session = Session()

    def __init__(self, job, device, evaluates=True, progress=str, like=None):
        self.job, self.device, self.progress = job, device, progress
        self.num_images, self.runs = job.largest_micro_batch, {}
        memfit = job.cfg.MEMFIT
        self.key = f"{job.cfg.SOLVER.AMP.ENABLED} {memfit.OPTIMIZER} {memfit.CHECKPOINT} "
        self.key += (
            f"{memfit.OFFLOAD} {memfit.MATCHING} {memfit.HEADS} {job.cfg.INPUT} {job.cfg.MODEL}"
        )

    def needs(self, num_images):
        """More images need more; all else is by chance."""
        chance = Random(f"{self.seed} {self.key}")
        return chance.uniform(0, 8) + num_images * chance.uniform(0.1, 2)

    def fits(self, budget_gb, num_images):
        return self.needs(num_images) <= budget_gb

    def run(self, num_images):
        return num_images

    def whole(self, num_images):
        return num_images

    def use(self, num_images):
        return num_images

    def budget_bytes(self, num_images):
        return self.needs(num_images) * 2**30


@pytest.fixture
def job():
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 8
    return Job.from_cfg(cfg, 1, **sized(cfg, *CASE))


@pytest.fixture
def invented(monkeypatch):
    monkeypatch.setattr(ladder_module, "DryJob", Invented)
    saved = {name: np.array([(i + 1) * 2**28]) for i, name in enumerate(BLOCKS)}
    made = sum(saved.values()), saved, Counter(BLOCKS)
    monkeypatch.setattr(ladder_module, "_saved_by_blocks", lambda _: made)
    monkeypatch.setattr(
        ladder_module, "blocks_of", lambda _, what: BLOCKS[: 4 if what == "backbone" else 7]
    )
    monkeypatch.setattr(Ladder, "trains_batch_norm", False)
    monkeypatch.setattr(ladder_module, "that_work", lambda _, names: names)
    return Invented


def harm(found):
    """Larger for what a user likes less: other tiers first, then work, then smaller batches."""
    if found is None:
        return (1,)
    rung, num_images = found
    order = [t.name for t in TECHNIQUES]
    names = sorted(map(order.index, rung.names), reverse=True)
    exact = [i for i in names if i < order.index("MixedPrecision")]
    blocks = rung.blocks
    if "ActivationOffload" in rung.names:
        level = 5
    elif "ChunkedHeads" in rung.names:
        level = 4
    elif not blocks:
        level = min(len(exact), 1)
    else:
        level = 3 if blocks[0] == "all" or (blocks[0] == "backbone" and blocks[1:]) else 2
    more = 99 if blocks in (("backbone",), ("all",)) else len(blocks)
    return (0, [i for i in names if i not in exact], level, exact, more, -num_images)


@pytest.mark.parametrize("prefer", ["exact", "speed"])
@pytest.mark.parametrize("tiers", [("exact",), ("exact", "precision"), TIERS, ("precision",)])
def test_more_memory_is_never_worse_whatever_a_rung_needs(
    invented, job, monkeypatch, tiers, prefer
):
    for seed in range(8):
        monkeypatch.setattr(invented, "seed", seed)
        found = found_in(Ladder(Invented(job, CUDA), 1, tiers, prefer), [0.1, *range(1, 26)])
        assert found[0] == (1,)
        assert found[-1][0] == 0
        assert found == sorted(found, reverse=True), (seed, found)


def test_what_changes_least_comes_first(invented, job):
    ladder = Ladder(Invented(job, CUDA), 1, TIERS)
    assert [(rung.names[-1], *rung.blocks) for rung in ladder._levels(())[2:]] == [
        ("ActivationCheckpointing", "backbone"),
        ("ActivationCheckpointing", "all"),
        ("ChunkedHeads", "all"),
        ("ActivationOffload", "all"),
    ]
    tiers = [get_technique(name).tier for name in ladder._leads()[-1]]
    assert [*dict.fromkeys(tiers)] == ["precision", "recipe"]
    assert [t.name for t in TECHNIQUES[-2:]] == ["SmallerImages", "FrozenModules"]


def test_only_what_is_needed_stays(invented, job, monkeypatch):
    monkeypatch.setattr(
        invented, "fits", lambda self, *_: self.job.cfg.MEMFIT.HEADS.CHUNK_SIZE is not None
    )
    rung, _ = Ladder(Invented(job, CUDA), 1, ("exact",)).search()
    assert rung.names == ("ChunkedHeads",)


def test_blocks_that_save_most_for_their_work_are_recomputed_first(invented, job, monkeypatch):
    """The backbone's save 0.25, 0.5, 0.75 and 1 GB of 7, and the budget is 5.3."""
    monkeypatch.setattr(
        invented, "fits", lambda self, *_: self.job.cfg.MEMFIT.CHECKPOINT.MODULES != []
    )
    monkeypatch.setattr(invented, "needs", lambda *_: 7)
    rung, _ = Ladder(Invented(job, CUDA), 5.3, ("exact",)).search()
    assert rung.blocks == ("backbone.2", "backbone.3")


def found_in(ladder, budgets_gb):
    """The harm of what a ladder finds for each budget. Its dry runs are made once."""
    found = []
    for ladder._budget_gb in budgets_gb:
        found.append(harm(ladder.search()))
    return found


R_CNN, RETINANET = "mask_rcnn_R_50_FPN_3x", "COCO-Detection/retinanet_R_50_FPN_1x"
JOBS = {
    "mask": (f"COCO-InstanceSegmentation/{R_CNN}", "cuda", []),
    "retinanet on a cpu": (RETINANET, "cpu", []),
    "batch norm": (
        "COCO-Detection/faster_rcnn_R_50_FPN_1x",
        "rtx_3060",
        ["MODEL.RESNETS.NORM", "BN"],
    ),
    "16 bits": (RETINANET, "rtx_3060", ["SOLVER.AMP.ENABLED", True]),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("batch norm", "16 bits")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mask", "retinanet on a cpu", *SLOW])
def test_more_memory_is_never_worse(name):
    """With the dry runs of a job, which all budgets share."""
    config, device, keys = JOBS[name]
    cfg = load_cfg(config, ["SOLVER.IMS_PER_BATCH", 4, *R18, *keys, "MEMFIT.BUDGET_GB", 9])
    start = DryJob(
        Job.from_cfg(cfg, 1, **sized(cfg, *CASE)), DeviceModel.load(device), evaluates=False
    )
    most = start.budget_bytes(start.use()) / 2**30
    budgets_gb = [0.7 + i * (1.02 * most - 0.7) / 7 for i in range(8)]
    found = found_in(Ladder(start, most, TIERS), budgets_gb)
    assert found[0] == (1,)
    assert found[-1] == harm((Rung(), 4))
    assert found == sorted(found, reverse=True), found
