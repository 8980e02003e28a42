# Copyright (c) the d2_memfit developers.
"""More memory makes no plan slower or more harmful."""

import pytest

from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, margin_of
from d2_memfit.planner.search import Trials, choice_of, preference
from d2_memfit.planner.search.fastest import Fastest
from d2_memfit.techniques import TIERS, get_technique

CASE = WorstCase((320, 480), 10)
R18 = ("MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64)
ALIKE = 1 / 0.98  # the search ignores smaller differences of predicted times

# Config, device, ranks, keys. Predicted times decide between the choices of equal harm.
JOBS = {
    "mask": ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "cuda", 1, [*R18]),
    "fast card": ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "v100", 1, [*R18]),
    "cpu": ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "cpu", 1, [*R18]),
    "retinanet": ("COCO-Detection/retinanet_R_50_FPN_1x", "cuda", 1, [*R18]),
    "c4": ("COCO-Detection/faster_rcnn_R_50_C4_1x", "rtx_3060", 1, []),
    "keypoints": ("COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x", "t4", 1, [*R18]),
    "panoptic": ("COCO-PanopticSegmentation/panoptic_fpn_R_50_1x", "rtx_3060", 1, []),
    "two ranks": ("Misc/cascade_mask_rcnn_R_50_FPN_1x", "rtx_3060", 2, [*R18]),
    "batch norm": (
        *("COCO-Detection/faster_rcnn_R_50_FPN_1x", "rtx_3060", 1),
        [*R18, "MODEL.RESNETS.NORM", "BN"],
    ),
    "mixed precision": (
        *("COCO-Detection/retinanet_R_50_FPN_1x", "rtx_3060", 1),
        [*R18, "SOLVER.AMP.ENABLED", True],
    ),
}
WAYS = [(("exact",), "exact"), (TIERS, "exact"), (("exact", "precision"), "speed")]


def choices(job, device, tiers, prefer, num_budgets):
    """The choice, its harm and seconds for budgets from too little memory to more than enough."""
    trials = Trials(job, device, DryJob, evaluates=False)
    fastest = Fastest(trials)
    start = choice_of((), job.geometry.largest_micro_batch)
    margin = margin_of(job, device)
    least = 0.9 * margin.budget_bytes(trials.dry_job(fastest.smallest(tiers)).least_bytes())
    most = 1.02 * margin.budget_bytes(trials.dry_job(start).total_bytes())
    for i in range(num_budgets):
        trials.budget_bytes = least + (most - least) * i / (num_budgets - 1)
        trials.limit_bytes = margin.limit_bytes(trials.budget_bytes)
        choice = fastest.choice(tiers, prefer)
        if choice is None:
            yield None, None, None
        else:
            yield choice, harm_of(choice, trials), trials.dry_job(choice).seconds()


def harm_of(choice, trials):
    """Places in the order of harm of what is not exact, the most harmful first."""
    places = [preference(name) for name in choice.names if get_technique(name).tier != "exact"]
    if choice.num_images < trials.job.geometry.largest_micro_batch:
        places += [(TIERS.index("recipe"), -1)] * (trials.micro_batch_tier == "recipe")
    return sorted(places, reverse=True)


def assert_more_memory_is_never_worse(name, num_budgets, ways=WAYS):
    config, device, ranks, keys = JOBS[name]
    opts = ["SOLVER.IMS_PER_BATCH", 4 * ranks, *keys]
    job = Job.from_any(load_cfg(config, opts), None, ranks, batch=CASE)
    for tiers, prefer in ways:
        found = list(choices(job, DeviceModel.load(device), tiers, prefer, num_budgets))
        assert found[0][0] is None
        assert found[-1][0] is not None
        for (before, harm_before, before_s), (after, harm, after_s) in zip(found, found[1:]):
            if before is None:
                continue
            assert after is not None, f"{tiers} {prefer}: lost after {before}"
            said = f"{tiers} {prefer}: {before} {before_s:.3f} s, {after} {after_s:.3f} s"
            if prefer == "exact":
                assert harm <= harm_before, said
            if prefer == "speed" or harm == harm_before:
                assert after_s <= ALIKE * before_s, said


@pytest.mark.slow
def test_more_memory_is_never_worse():
    assert_more_memory_is_never_worse("retinanet", 12, WAYS[:1])


OFTEN = ("cpu", "retinanet")
OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in JOBS if name not in OFTEN]


@pytest.mark.long
@pytest.mark.parametrize("name", [*OFTEN, *OTHERS])
def test_more_memory_is_never_worse_in_a_hundred_budgets(name):
    assert_more_memory_is_never_worse(name, 100)
