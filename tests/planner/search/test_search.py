# Copyright (c) the d2_memfit developers.
import re

import pytest
import torch
from tiny import tiny_cfg

from d2_memfit import estimate_memory, plan_memory
from d2_memfit.config.load import load_cfg
from d2_memfit.errors import ConfigError
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner import search
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, in_words, steps
from d2_memfit.planner.search import Trials
from d2_memfit.planner.writing import describe_plan, planned_config, why_it_does_not_fit

pytestmark = pytest.mark.slow

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"


# The smallest image sizes with which the planner's choices are those of larger ones.
CASE = WorstCase((320, 480), 10)


@pytest.fixture(scope="module")
def mask():
    """Mask R-CNN R18-FPN with an effective batch of 8."""
    resnet = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    return load_cfg(MASK, ["SOLVER.IMS_PER_BATCH", 8, *resnet])


@pytest.fixture(scope="module", autouse=True)
def shared_dry_runs():
    """A dry run that one test has made is there for the others: it does not depend on budgets."""
    known = {}

    def shared(function):
        def run(job, batch, *args):
            of_run = job.with_settings({"MEMFIT.BUDGET_GB": None}).cfg
            images = batch[0] if isinstance(batch[0], list) else batch
            sizes = [(i["image"].shape, len(i.get("instances", ()))) for i in images]
            key = f"{function.__name__} {job.ranks} {of_run} {sizes} {args}"
            if key not in known:
                known[key] = function(job, batch, *args)
            return known[key]

        return run

    with pytest.MonkeyPatch.context() as patch:
        for function in (steps.train, steps.evaluate):
            patch.setattr(steps, function.__name__, shared(function))
        yield


def plan(cfg, budget_gb, **kwargs):
    """For training alone, which needs more than evaluation in all these jobs."""
    options = {"device": "cuda", "batch": CASE, "evaluates": False, **kwargs}
    return plan_memory(cfg, budget_gb, **options)


def test_ranks_share_optimizer_states_and_batches_and_each_recovers(mask):
    alone, eight = plan(mask, 10), plan(mask, 10, num_gpus=8)
    assert eight.before.images_per_gpu == 1
    assert eight.before.device_total_gb < alone.before.device_total_gb
    assert alone.settings["MEMFIT.OOM.POLICY"] == eight.settings["MEMFIT.OOM.POLICY"] == "split"


def test_techniques_are_taken_as_far_as_they_are_needed(mask):
    all_of_them = plan(mask, 1, allow=["exact"])
    assert not all_of_them.fits
    smaller, techniques = all_of_them.steps
    assert (smaller.name, techniques.name) == ("smaller micro-batches", "every technique")
    assert smaller.settings == {"MEMFIT.MICRO_BATCH": 1}
    keys = ["MEMFIT.HEADS.CHUNK_SIZE", "MEMFIT.CHECKPOINT.MODULES", "MEMFIT.OFFLOAD.MODULES"]
    assert [key for key in techniques.settings if key in keys] == keys
    assert techniques.settings["MEMFIT.CHECKPOINT.MODULES"] == ["all"]
    assert techniques.time_factor > 1.15  # a forward more
    assert techniques.gb_after < techniques.gb_before == smaller.gb_after
    job = Job.from_cfg(mask, batch=CASE).with_settings(all_of_them.settings)
    needed_gb = DryJob(job, DeviceModel.load("cuda"), evaluates=False).least_bytes() / 2**30
    assert needed_gb < all_of_them.smallest_budget_gb < 1.25 * needed_gb
    said = re.search(r"The smallest budget is ([\d.]+) GB", why_it_does_not_fit(all_of_them))
    assert float(said[1]) - 0.01 <= all_of_them.smallest_budget_gb <= float(said[1])
    enough = plan(mask, float(said[1]), allow=["exact"])
    assert enough.fits
    assert len(enough.settings) < len(all_of_them.settings)
    assert "every technique" not in [step.name for step in enough.steps]
    assert all(step.gb_after < step.gb_before for step in enough.steps)


def test_what_fits_is_left_alone(mask):
    p = plan(mask, 24, evaluates=True)
    assert p.fits
    assert p.steps == ()
    assert p.settings == {"MEMFIT.BUDGET_GB": 24, "MEMFIT.OOM.POLICY": "split"}
    assert p.time_factor == 1
    assert p.time_range == (1, 1)


@pytest.mark.parametrize("budget_gb", [24, 3.5])
def test_the_exact_plan_is_shown_beside_the_faster_one_that_was_asked_for(mask, budget_gb):
    p, faster = (plan(mask, budget_gb, device="v100", prefer=what) for what in ("exact", "speed"))
    assert {s.tier for s in p.steps} <= {"exact", "not known"}
    assert p.other is None
    assert faster.time_factor < p.time_factor
    assert faster.steps[-1].name == "MixedPrecision"
    assert faster.steps[-1].what.startswith("the rounding of activations")
    assert faster.other.time_range == p.time_range
    assert faster.other.device_total_gb == p.estimate.device_total_gb
    text = describe_plan(faster)
    assert "MixedPrecision changes the rounding of activations" in text
    assert f"(--allow exact): time x {in_words(p.time_range)}, " in text
    only_exact = plan(mask, budget_gb, device="v100", allow=["exact"], prefer="speed")
    assert only_exact.other is None
    assert only_exact.settings == p.settings


def test_float16_is_not_planned_where_it_is_known_to_fail(mask):
    p = plan(mask, 3.5, prefer="speed", device="gtx_1650")
    assert "MixedPrecision" not in [s.name for s in p.steps]
    assert "float16 is known to fail on NVIDIA GeForce GTX 1650" in describe_plan(p)


def test_on_a_cpu_16_bits_are_for_what_does_not_fit_otherwise(mask):
    p = plan(mask, 24, device="cpu")
    assert p.steps == ()


@pytest.mark.parametrize("is_usable", [True, False])
def test_a_cpu_without_kernels_for_16_bits_has_no_plan_with_them(mask, monkeypatch, is_usable):
    monkeypatch.setattr(search.trials, "has_kernels_for_bfloat16", lambda: is_usable)
    trials = Trials(Job.from_cfg(mask, batch=SMALL), DeviceModel.load("cpu"), evaluates=False)
    assert trials.is_usable("MixedPrecision") == is_usable
    said = "MixedPrecision: left out, PyTorch has no fast 16 bits on this CPU"
    assert trials.left_out == ([] if is_usable else [said])


def test_micro_batches_come_first_and_the_effective_batch_stays(mask, log):
    p = plan(mask, 3.5, allow=["exact"])
    assert p.fits
    assert [s.name for s in p.steps] == ["smaller micro-batches"]
    assert p.settings["MEMFIT.MICRO_BATCH"] == 3  # 3, 3 and 2 are the 8
    assert p.estimate.device_total_gb <= 3.5 * 0.9 < p.before.device_total_gb
    planned = planned_config(mask, p)
    assert planned.SOLVER == mask.SOLVER  # batch, learning rate, schedule
    again = estimate_memory(planned, device="cuda", batch=CASE, evaluates=False)
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


def test_a_recipe_of_other_gpus_is_scaled_as_the_trainer_does_it(mask):
    cfg = mask.clone()
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
    assert plan(cfg, 10).before.images_per_gpu == 1
    cfg.SOLVER.ACCUMULATION_STEPS = 4
    before = plan(cfg, 10).before
    assert (before.images_per_gpu, before.accumulation_steps) == (1, 4)


def test_what_the_allocator_can_give_back_does_not_count_in_a_budget(mask):
    without = estimate_memory(mask, device="cuda", batch=CASE, evaluates=False)
    limited = mask.clone()
    limited.MEMFIT.BUDGET_GB = (without.device_total_gb - 0.02) / 0.9
    limited.MEMFIT.PLAN.MARGIN = 0.1
    within = estimate_memory(limited, device="cuda", batch=CASE, evaluates=False)
    assert within.peak_allocated_gb == pytest.approx(without.peak_allocated_gb, rel=0.01)
    assert within.device_total_gb <= without.device_total_gb - 0.02


def test_the_cache_is_given_back_for_the_margin_alone_and_not_in_the_budget(mask):
    """Each iteration would give it back, which recovery takes for too little memory."""
    needed_gb = plan(mask, 24).before.device_total_gb
    cfg = mask.clone()
    cfg.MEMFIT.PLAN.MARGIN = 0.01
    assert plan(cfg, needed_gb + 0.001, allow=["exact"]).steps == ()
    too_little = plan(cfg, needed_gb - 0.02, allow=["exact"])
    assert too_little.steps
    assert too_little.estimate.device_total_gb < needed_gb - 0.02


def test_what_does_not_fit_has_a_step_for_all_techniques_of_each_tier(mask):
    p = plan(mask, 0.9, allow=["exact", "precision"])
    assert not p.fits
    assert [(s.name, s.tier) for s in p.steps] == [
        ("smaller micro-batches", "not known"),
        ("every technique", "exact"),
        ("every technique", "precision"),
    ]
    assert [s.gb_before for s in p.steps[1:]] == [s.gb_after for s in p.steps[:-1]]
    merged = {key: value for s in p.steps for key, value in s.settings.items()}
    assert merged == {k: v for k, v in p.settings.items() if k in merged}
    assert "MEMFIT.BUDGET_GB 0.9: the job does not fit" in describe_plan(p)


def test_micro_batches_are_of_the_exact_tier(mask):
    without = plan(mask, 3.5, allow=["precision"])
    assert "smaller micro-batches" not in [s.name for s in without.steps]
    assert "MEMFIT.MICRO_BATCH" not in without.settings
    assert without.estimate.micro_batch_size == 8


def test_what_does_not_fit_says_what_would_have_to_be_allowed(mask):
    cfg = mask.clone()
    cfg.MEMFIT.PLAN.MARGIN = 0.1
    p = plan(cfg, 1.2, allow=["exact"])
    assert not p.fits
    assert 1.3 < p.smallest_budget_gb < 2
    assert p.must_allow[:2] == ("exact", "precision")  # with 8-bit states that may be enough


def test_what_fits_only_without_its_margin_does_not_fit_and_says_its_chance(mask):
    smallest_gb = plan(mask, 1.0, allow=["exact"]).smallest_budget_gb
    p = plan(mask, smallest_gb - 0.06, allow=["exact"])
    assert not p.fits
    assert p.estimate.device_total_gb < p.budget_gb < p.smallest_budget_gb == smallest_gb
    assert 0.5 < p.chance < 0.95
    said = re.search(r"MEMFIT.PLAN.RISK ([\d.]+) accepts that", describe_plan(p).splitlines()[0])
    cfg = mask.clone()
    cfg.MEMFIT.PLAN.RISK = float(said[1])
    accepted = plan(cfg, p.budget_gb, allow=["exact"])
    assert accepted.fits
    assert accepted.chance == pytest.approx(p.chance, abs=0.1)
    assert plan(mask, smallest_gb, allow=["exact"]).chance == pytest.approx(0.95, abs=0.03)


def test_recipes_say_what_they_change_and_only_those_that_are_needed_stay():
    cfg = small_job(3)
    needed_gb = estimate_memory(cfg, device="cuda", batch=SMALL, evaluates=False).device_total_gb
    p = plan(cfg, needed_gb - 0.01, batch=SMALL, allow=["recipe"])
    assert p.fits
    (step,) = p.steps
    assert (step.name, step.tier) == ("SmallerRoiBatch", "recipe")
    assert step.settings == {"MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 256}
    assert step.what == "the sampling; small objects are seen less often."


def test_with_batch_norm_smaller_micro_batches_are_another_recipe():
    cfg = small_job(4)
    cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.RESNETS.NORM = 8, "BN"
    needed_gb = estimate_memory(cfg, device="cuda", batch=SMALL, evaluates=False).device_total_gb
    p = plan(cfg, needed_gb - 0.01, batch=SMALL, allow=["exact"])
    assert "smaller micro-batches" not in [s.name for s in p.steps]
    p = plan(cfg, needed_gb - 0.05, batch=SMALL, allow=["recipe"])
    assert (p.steps[0].name, p.steps[0].tier) == ("smaller micro-batches", "recipe")
    assert p.steps[0].what == "the images in BatchNorm's statistics."


def test_a_users_case_is_what_is_planned_for(mask):
    small = WorstCase((224, 224), 5)
    assert plan(mask, 9, batch=small).before.device_total_gb < plan(mask, 9).before.device_total_gb


@pytest.mark.parametrize(
    ("budget", "kwargs", "message"),
    [
        (0, {}, "MEMFIT.BUDGET_GB must be a number of GB above 0"),
        (-1, {}, "MEMFIT.BUDGET_GB must be a number of GB above 0"),
        ("6 gigs", {}, "MEMFIT.BUDGET_GB must be a number of GB above 0"),
        (None, {}, "a plan needs a budget"),
        (6, {"num_gpus": 0}, "num_gpus must be a positive integer, got 0"),
        (6, {"num_gpus": 3}, "SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, 3"),
        (6, {"allow": ["lossy"]}, "allow must be some of exact, precision, recipe, got"),
    ],
)
def test_values_that_cannot_work_are_refused(mask, budget, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        plan(mask, budget, **kwargs)


def test_an_unknown_device_is_refused(mask):
    with pytest.raises(ConfigError, match=r"there is no device 'v10' \(did you mean v100 or "):
        estimate_memory(mask, device="v10")


def test_a_model_that_cannot_be_built_is_one_line():
    cfg = tiny_cfg()
    cfg.MODEL.BACKBONE.NAME = "no_such_backbone"
    with pytest.raises(ConfigError, match=r"does not run .*no_such_backbone"):
        estimate_memory(cfg)


def test_planning_draws_no_random_numbers():
    cfg = tiny_cfg(fpn=False)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    plan_memory(cfg, 20, batch=WorstCase((64, 64), 2))
    assert torch.rand(1) == expected


SMALL = WorstCase((64, 64), 3)


def small_job(seed):
    """A job whose dry runs no other test has made, of one image and a small model."""
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN, cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 2000, 512
    cfg.SOLVER.IMS_PER_BATCH, cfg.SEED = 1, seed
    cfg.MEMFIT.PLAN.MARGIN = 0.01
    return cfg


def test_a_technique_that_the_job_does_not_run_with_is_left_out_and_it_is_said(monkeypatch):
    from d2_memfit.techniques.heads import ChunkedHeads

    def broken(model, cfg):
        model.roi_heads.forward = None
        return model

    monkeypatch.setattr(ChunkedHeads, "apply", broken)
    lines = []
    cfg = small_job(0)
    before = estimate_memory(cfg, device="cuda", batch=SMALL, evaluates=False)
    p = plan(cfg, before.device_total_gb, batch=SMALL, allow=["exact"], progress=lines.append)
    assert "ChunkedHeads" not in [s.name for s in p.steps]
    assert any("ChunkedHeads: left out, the model of this job does not run" in x for x in lines)
    assert any("ChunkedHeads: left out" in line for line in p.left_out)


def test_techniques_that_only_run_alone_do_not_end_a_plan(monkeypatch):
    from d2_memfit.techniques.activation_checkpointing import ActivationCheckpointing

    apply = ActivationCheckpointing.apply

    def with_chunks_it_is_broken(model, cfg):
        if cfg.MEMFIT.HEADS.CHUNK_SIZE is not None or cfg.SOLVER.AMP.ENABLED:
            raise RuntimeError("not both")
        return apply(model, cfg)

    monkeypatch.setattr(ActivationCheckpointing, "apply", with_chunks_it_is_broken)
    p = plan(small_job(1), 0.5, batch=SMALL, allow=["exact"])
    assert not p.fits  # the smallest one is known all the same
    assert "MEMFIT.HEADS.CHUNK_SIZE" in p.settings
    assert "MEMFIT.CHECKPOINT.MODULES" not in p.settings
    pairs = [line.partition(": left out, ") for line in p.left_out]
    assert any("ChunkedHeads, ActivationCheckpointing" in names for names, _, _ in pairs)
    assert all("RuntimeError: not both" in why for _, _, why in pairs)
    assert p.left_out[0] in describe_plan(p)


def test_a_technique_that_changes_nothing_is_no_help(monkeypatch):
    from d2_memfit.techniques.heads import ChunkedHeads

    monkeypatch.setattr(ChunkedHeads, "apply", lambda model, cfg: model)
    job = Job.from_any(small_job(2), batch=SMALL)
    trials = Trials(job, DeviceModel.load("cuda"), evaluates=False)
    trials.limit_bytes = 2**30
    assert not trials.helps("ChunkedHeads")
    assert trials.helps("MixedPrecision")
    assert trials.left_out == []


@pytest.mark.parametrize(
    ("budget_gb", "tiers", "most"),
    [
        (24, "exact", 1),
        (3.5, "exact", 18),
        (3.5, "exact,precision", 18),
        (1.6, "exact", 20),
        (0.9, "exact,precision", 5),  # does not fit
    ],
)
def test_a_plan_takes_no_more_dry_runs_than_recorded(mask, budget_gb, tiers, most):
    assert_no_more_dry_runs_than(most, mask, budget_gb, tiers)


def test_techniques_are_compared_at_the_micro_batch_that_batch_norm_keeps(mask):
    cfg = mask.clone()
    cfg.SOLVER.IMS_PER_BATCH, cfg.MODEL.RESNETS.NORM, cfg.MODEL.BACKBONE.FREEZE_AT = 2, "BN", 0
    tried = assert_no_more_dry_runs_than(10, cfg, 2, "exact")
    assert all("GB: 2 images" in line for line in tried)


def assert_no_more_dry_runs_than(most, cfg, budget_gb, tiers):
    lines = []
    plan(cfg, budget_gb, allow=tiers.split(","), progress=lines.append)
    tried = [line for line in lines if " GB: " in line]
    assert len(tried) == len(set(tried))
    assert len(tried) <= most, (
        "a plan takes more dry runs than recorded. If that is a new technique, which is tried too, "
        "raise the number; " + "; ".join(tried)
    )
    return tried
