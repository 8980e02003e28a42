# Copyright (c) the d2_memfit developers.
import re

import pytest
import torch
from tiny import sized, tiny_cfg

from d2_memfit import estimate_memory, plan_memory
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner import ladder as ladder_module
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.ladder import Ladder
from d2_memfit.planner.plan_file import planned, planned_yaml
from d2_memfit.planner.steps import Session
from d2_memfit.planner.text import answer_of_plan, describe_plan

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"


# The smallest image sizes with which the planner's choices are those of larger ones.
CASE = {"image_size": (320, 480), "num_instances": 10}


@pytest.fixture(scope="module")
def mask():
    """Mask R-CNN R18-FPN with an effective batch of 8."""
    resnet = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    cfg = load_cfg(MASK, ["SOLVER.IMS_PER_BATCH", 8, *resnet])
    sized(cfg, **CASE)
    return cfg


def plan(cfg, budget_gb, **kwargs):
    """For training alone, which needs more than evaluation in all these jobs."""
    options = {"device": "cuda", **CASE, "evaluates": False, **kwargs}
    return plan_memory(cfg, budget_gb, **options)


def test_ranks_share_optimizer_states_and_batches_and_each_recovers(mask):
    alone, eight = plan(mask, 10), plan(mask, 10, num_gpus=8)
    assert eight.before.images_per_gpu == 1
    assert eight.before.device_total_gb < alone.before.device_total_gb
    assert alone.settings["MEMFIT.OOM.POLICY"] == eight.settings["MEMFIT.OOM.POLICY"] == "split"


@pytest.mark.slow
def test_what_does_not_fit_says_the_smallest_budget_which_then_fits(mask):
    p = plan(mask, 1, allow=["exact"])
    assert not p.fits
    assert p.steps[0].settings == {"MEMFIT.MICRO_BATCH": 1}
    assert p.settings["MEMFIT.CHECKPOINT.MODULES"] == ["all"]
    assert p.settings["MEMFIT.OFFLOAD.MODULES"] == ["*"]
    assert "MEMFIT.OPTIMIZER.ZERO" not in p.settings  # of one rank
    assert p.time_factor is None  # copies to the host decide
    said = re.search(r"needs a budget of ([\d.]+) GB", answer_of_plan(p))
    assert float(said[1]) == p.smallest_budget_gb
    assert "one image needs" in p.obstacle
    assert plan(mask, p.smallest_budget_gb, allow=["exact"]).fits
    almost = plan(mask, p.smallest_budget_gb - 0.02, allow=["exact"])
    assert not almost.fits
    assert almost.must_allow[:2] == ("exact", "precision")
    assert "MEMFIT.MICRO_BATCH" not in plan(mask, 1, allow=["precision"]).settings


@pytest.mark.slow
def test_what_fits_is_left_alone(mask, monkeypatch):
    p = plan(mask, 24, evaluates=True)
    assert p.fits
    assert p.steps == ()
    assert p.settings == {"MEMFIT.BUDGET_GB": 24, "MEMFIT.OOM.POLICY": "split"}
    assert p.time_factor == 1
    monkeypatch.setattr(DryJob, "probe", lambda job: setattr(job, "budget_bytes", lambda _: 2**35))
    assert not plan(mask, 24, probe=True).fits


@pytest.mark.slow
@pytest.mark.parametrize("budget_gb", [24, 3.5])
def test_mixed_precision_comes_first_only_if_speed_is_preferred(mask, budget_gb):
    p, faster = (plan(mask, budget_gb, device="v100", prefer=what) for what in ("exact", "speed"))
    assert {s.tier for s in p.steps} <= {"exact"}
    assert faster.steps[-1].name == "MixedPrecision"
    assert faster.steps[-1].what.startswith("the rounding of activations")
    assert faster.time_factor is None
    assert "MixedPrecision changes the rounding of activations" in describe_plan(faster)
    only_exact = plan(mask, budget_gb, device="v100", allow=["exact"], prefer="speed")
    assert only_exact.settings == p.settings


def test_float16_is_not_planned_where_it_is_known_to_fail(mask):
    p = plan(mask, 3.5, prefer="speed", device="gtx_1650")
    assert "MixedPrecision" not in [s.name for s in p.steps]
    assert "float16 is known to fail on NVIDIA GeForce GTX 1650" in describe_plan(p)


@pytest.mark.parametrize("is_usable", [True, False])
def test_a_cpu_without_kernels_for_16_bits_has_no_plan_with_them(mask, monkeypatch, is_usable):
    monkeypatch.setattr(ladder_module, "has_kernels_for_bfloat16", lambda: is_usable)
    start = DryJob(Job.from_cfg(mask, **SMALL), DeviceModel.load("cpu"), evaluates=False)
    ladder = Ladder(start, 6, ["precision"])
    assert ladder._is_usable("MixedPrecision") == is_usable
    assert not ladder._is_usable("ActivationOffload")
    said = "MixedPrecision: left out, PyTorch has no fast 16 bits on this CPU"
    assert ladder.left_out == ([] if is_usable else [said])


def test_micro_batches_come_first_and_the_effective_batch_stays(mask, log):
    p = plan(mask, 3.5, allow=["exact"])
    assert p.fits
    assert [s.name for s in p.steps] == ["smaller micro-batches"]
    assert p.settings["MEMFIT.MICRO_BATCH"] == 3  # 3, 3 and 2 are the 8
    assert p.estimate.device_total_gb <= 3.5 < p.before.device_total_gb
    with_plan = planned(mask, planned_yaml(mask, p))
    assert with_plan.SOLVER == mask.SOLVER  # batch, learning rate, schedule
    again = estimate_memory(with_plan, device="cuda", **CASE, evaluates=False)
    assert again.device_total_gb == p.estimate.device_total_gb
    assert "is on" not in log.text  # what is tried is not the user's job


def test_a_users_micro_batch_is_not_made_larger(mask):
    cfg = mask.clone()
    cfg.MEMFIT.MICRO_BATCH = 2
    p = plan(cfg, 24, allow=["exact"])
    assert p.steps == ()
    assert p.before.micro_batch_size == p.estimate.micro_batch_size == 2
    p = plan(cfg, 1.9, allow=["exact"])
    assert p.settings["MEMFIT.MICRO_BATCH"] == 1


@pytest.mark.slow
def test_estimate_and_plan_agree_on_what_fits(mask):
    """At the budget in which the job just fits as it is, and a little below."""
    start = DryJob(Job.from_cfg(mask, 1, **CASE), DeviceModel.load("cuda"), evaluates=False)
    start.expandable_segments = True
    start.whole()
    least = start.budget_bytes(start.use()) / 2**30
    for budget_gb, fits in ((least + 1e-6, True), (least - 1e-3, False)):
        cfg = mask.clone()
        cfg.MEMFIT.BUDGET_GB = budget_gb
        dry_job = DryJob(Job.from_cfg(cfg, 1, **CASE), DeviceModel.load("cuda"), False)
        assert dry_job.fits(budget_gb) == fits
        p = plan(mask, budget_gb, allow=["exact"])
        assert (p.steps == ()) == fits
        if fits:
            assert p.estimate == dry_job.estimate()


def needed_gb(cfg):
    """The smallest budget of a job as it is."""
    job = DryJob(Job.from_any(cfg, **SMALL), "cuda", evaluates=False)
    return job.budget_bytes(job.use()) / 2**30


def test_recipes_say_what_they_change_and_only_those_that_are_needed_stay():
    cfg = small_job(3)
    p = plan(cfg, needed_gb(cfg) - 0.01, **SMALL, allow=["recipe"])
    assert p.fits
    (step,) = p.steps
    assert (step.name, step.tier) == ("SmallerRoiBatch", "recipe")
    assert step.settings == {"MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 256}
    assert step.what == "the sampling; small objects are seen less often"


@pytest.mark.slow
def test_with_batch_norm_there_are_no_smaller_micro_batches():
    cfg = small_job(4)
    cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.RESNETS.NORM = 8, "BN"
    p = plan(cfg, needed_gb(cfg) - 0.01, **SMALL, allow=["exact"])
    assert "smaller micro-batches" not in [s.name for s in p.steps]
    p = plan(cfg, 0.6, **SMALL, allow=["exact"])
    assert p.obstacle.startswith("BatchNorm is trained: the 8 images of one GPU cannot be split")
    assert "One image on each of 8 GPUs needs" in p.obstacle


@pytest.mark.parametrize(
    ("budget", "kwargs", "message"),
    [
        (0, {}, "MEMFIT.BUDGET_GB"),
        (None, {}, "MEMFIT.BUDGET_GB of a plan must be a positive number"),
        (6, {"num_gpus": 3}, "SOLVER.IMS_PER_BATCH"),
        (6, {"allow": ["lossy"]}, "MEMFIT.PLAN.ALLOW must be"),
        (6, {"device": "v10"}, "did you mean v100"),
    ],
)
def test_values_that_cannot_work_are_refused(mask, budget, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        plan(mask, budget, **kwargs)


def test_planning_draws_no_random_numbers():
    cfg = tiny_cfg(fpn=False)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    plan_memory(cfg, 20, **sized(cfg, (64, 64), 2))
    assert torch.rand(1) == expected


SMALL = {"image_size": (64, 64), "num_instances": 3}


def small_job(seed):
    """A job whose dry runs no other test has made, of one image and a small model."""
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN, cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 2000, 512
    cfg.SOLVER.IMS_PER_BATCH, cfg.SEED = 1, seed
    sized(cfg, **SMALL)
    return cfg


def test_techniques_that_only_run_alone_do_not_end_a_plan(monkeypatch):
    from d2_memfit.techniques.checkpointing import ActivationCheckpointing
    from d2_memfit.techniques.heads import ChunkedHeads

    checkpoint, of_heads = ActivationCheckpointing.apply, ChunkedHeads.apply

    def apply_checkpointing(self, model, value):
        model = checkpoint(self, model, value)
        model.is_checkpointed = True
        return model

    def apply_chunks(self, model, value):
        model = of_heads(self, model, value)
        if getattr(model, "is_checkpointed", False):
            model.roi_heads.forward = lambda *_: 1 / 0
        return model

    monkeypatch.setattr(ActivationCheckpointing, "apply", apply_checkpointing)
    monkeypatch.setattr(ChunkedHeads, "apply", apply_chunks)
    lines = []
    p = plan(small_job(1), 0.5, **SMALL, allow=["exact"], progress=lines.append)
    assert not p.fits  # the smallest one is known all the same
    assert "MEMFIT.CHECKPOINT.MODULES" in p.settings
    assert "MEMFIT.HEADS.CHUNK_SIZE" not in p.settings
    assert any("ActivationCheckpointing, ChunkedHeads: left out, " in line for line in p.left_out)
    assert all("ZeroDivisionError" in line and line in lines for line in p.left_out)
    assert p.left_out[0] in describe_plan(p)


@pytest.fixture
def images_of_runs(monkeypatch):
    """Numbers of images of all dry runs of training steps, in order."""
    images = []
    train = Session.train

    def counted(self, *micro_batches, **options):
        images.extend(map(len, micro_batches))
        return train(self, *micro_batches, **options)

    monkeypatch.setattr(Session, "train", counted)
    return images


@pytest.mark.parametrize(
    ("budget_gb", "most_runs", "most_images"),
    [
        (24, 3, 13),  # 3, 2, and 8 to verify
        (3.5, 4, 12),  # 3, 2, and 4 and 3 to verify
        pytest.param(1.6, 15, 28, marks=pytest.mark.slow),  # of 1, but the lines of four rungs
        (0.9, 3, 3),  # of 1: the last rung, and that of each tier that is not allowed
    ],
)
def test_dry_runs_have_at_most_3_images_but_those_that_verify(
    mask, images_of_runs, budget_gb, most_runs, most_images
):
    plan(mask, budget_gb, allow=["exact"])
    assert {3, 2} < {*images_of_runs} or {*images_of_runs} == {1}
    assert len(images_of_runs) <= most_runs
    assert sum(images_of_runs) <= most_images


@pytest.mark.slow
def test_an_estimate_has_dry_runs_of_2_and_3_images_and_objects_two_of_1_more(mask, images_of_runs):
    estimate_memory(mask, device="cuda", **CASE, evaluates=False)
    assert images_of_runs == [3, 2]
    images_of_runs.clear()
    plan(mask, 24, counts_objects=True)
    assert images_of_runs == [3, 2, 8, 1, 1]
