# Copyright (c) the d2_memfit developers.
"""Cost models: how near they come to dry runs that they have not seen, and plans that have one."""

import numpy as np
import pytest

from d2_memfit import Job, plan_memory
from d2_memfit.config import load_cfg
from d2_memfit.engine.window import ByteCutter
from d2_memfit.errors import ConfigError
from d2_memfit.iteration import MicroBatchShape, Padding, largest_sum
from d2_memfit.job import WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, margin_of, steps
from d2_memfit.planner.search import CostFit
from d2_memfit.planner.search.cost_fit import MeasuredMicroBatch, fitted, fitted_to_two
from d2_memfit.planner.writing import describe_plan, planned, planned_yaml
from d2_memfit.settings import Settings

CASE = WorstCase((320, 480), 40)
BUDGET_GB = 2.4


def cfg_of(config="COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml", *opts):
    """With a ResNet-18, and an effective batch of 8."""
    resnet = ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    return load_cfg(config, ["SOLVER.IMS_PER_BATCH", 8, *resnet, *opts])


def run(features, sums):
    return MeasuredMicroBatch(features, largest_sum(sums, features), 0)


def test_the_larger_of_two_sums_is_found_again():
    sums = [(1e9, 5e8, 700.0, 0, 0, 0), (1.1e9, 0, 500.0, 0, 0, 6.0)]
    sizes = [(1, 1), (1, 100), (1, 300), (2, 1), (2, 300), (1, 450), (2, 450)]
    runs = [
        run((1, n, n * pixels, n * objects, n * objects * pixels, objects * pixels), sums)
        for n, objects in sizes
        for pixels in (3e5, 1e6)
    ]
    first = fitted([r for r in runs if r.features[3] <= r.features[1]])
    found = fitted_to_two(runs, first, 1.02)
    assert [r.predicted(found) for r in runs] == pytest.approx([r.needs for r in runs], rel=1e-6)
    unseen = run((1, 4, 4 * 8e5, 4 * 200, 4 * 200 * 8e5, 200 * 8e5), sums)
    assert unseen.predicted(found) == pytest.approx(unseen.needs, rel=1e-6)


def test_no_term_is_below_zero():
    features = [(1, n, n * 1e6, n, n * 1e6, 1e6) for n in range(1, 5)]
    runs = [MeasuredMicroBatch(f, 1e9 - 1e7 * f[1], 0) for f in features]
    assert min(fitted(runs, has_objects=True)) >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
        *(
            pytest.param(config, marks=pytest.mark.exhaustive)
            for config in (
                "COCO-Detection/retinanet_R_50_FPN_1x.yaml",
                "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x.yaml",
            )
        ),
    ],
)
def test_dry_runs_that_were_not_seen_are_predicted(config):
    settings = {"MEMFIT.BUDGET_GB": BUDGET_GB, "MEMFIT.MICRO_BATCH": 2}
    job = Job.from_cfg(cfg_of(config), batch=CASE).with_settings(settings)
    fit = CostFit(job, DeviceModel.load("cuda"), Padding(32))
    for scale, objects in ((0.7, [7]), (0.9, [20, 3]), (0.8, [5] * 5), (1, [80, 1, 1])):
        assert fit.dry_run(scale, objects) == pytest.approx(1, abs=0.03)
    error_bytes = fit.settings()["MEMFIT.COST_MODEL.ERROR_GB"] * 2**30
    too_low = max(run.needs - run.predicted(fit.sums) for run in fit.runs)
    assert 0 < too_low == pytest.approx(error_bytes, abs=2**20)


@pytest.mark.slow
def test_the_optimizers_step_which_no_cut_changes_does_not_count():
    settings = {"MEMFIT.BUDGET_GB": BUDGET_GB, "MEMFIT.MICRO_BATCH": 1}
    cfg = cfg_of("COCO-Detection/rpn_R_50_FPN_1x.yaml")
    job = Job.from_cfg(cfg, batch=WorstCase((32, 48), 1)).with_settings(settings)
    device = DeviceModel.load("cuda")
    fit = CostFit(job, device, Padding(32))
    whole = DryJob(job, device, evaluates=False)
    phases = {a.phase for a in whole.training.alive_at_peak()}
    assert phases == {"setup"}  # which has a first step, with as much memory as later ones
    assert fit.runs[0].needs < whole.least_bytes() - 2**24


def plan_of(cfg, lines=None, **kwargs):
    kwargs = {"budget_gb": BUDGET_GB, "allow": ["exact"], "cost_model": True, **kwargs}
    progress = [].append if lines is None else lines.append
    return plan_memory(cfg, device="cuda", batch=CASE, progress=progress, evaluates=False, **kwargs)


@pytest.mark.slow
@pytest.mark.long  # fit, cut and config are each tested alone, too
def test_a_plan_has_a_cost_model_on_request_and_its_config_cuts_by_it():
    cfg = cfg_of()
    plan = plan_of(cfg, budget_gb=1.9)
    assert "MEMFIT.MICRO_BATCH" in plan.settings  # how many of the largest images, for estimates
    assert "Windows are cut by predicted bytes" in describe_plan(plan)
    cost_model = Settings.from_cfg(planned(cfg, planned_yaml(cfg, plan)), 1).cost_model
    assert 1 <= len(cost_model.sums) <= 2
    assert 0 < cost_model.limit_bytes <= 1.9 * 0.9 * 2**30
    assert cost_model.overhead_pixels >= 0
    largest = MicroBatchShape.from_images(
        np.array([(320, 480, 40)] * plan.settings["MEMFIT.MICRO_BATCH"])
    )
    assert cost_model.bytes_of(largest, Padding(32)) < cost_model.limit_bytes * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [1, 2])
def test_the_cost_model_and_the_plan_agree_about_the_smallest_budget(num_images):
    """The budget is just enough for micro-batches of one or two of the largest images."""
    cfg, device = cfg_of(), DeviceModel.load("cuda")
    keys = {"MEMFIT.MICRO_BATCH": num_images, "MEMFIT.BUDGET_GB": 4.0}
    job = Job.from_cfg(cfg, batch=CASE).with_settings(keys)
    needs = DryJob(job, device, evaluates=False).total_bytes()
    budget_gb = margin_of(job, device).budget_bytes(needs) / 2**30 + 0.001
    plan = plan_of(cfg, budget_gb=budget_gb)
    planned_images = plan.settings["MEMFIT.MICRO_BATCH"]
    assert planned_images >= num_images
    settings = Settings.from_cfg(planned(cfg, planned_yaml(cfg, plan)), 1)
    cutter = ByteCutter(settings.cost_model, steps.build(job)[0], grow_after=1)
    window = np.array([[(320, 480, 40)] * 2 * planned_images])
    assert [len(part) for part in cutter.quickest(window).parts(0)] == [planned_images] * 2


@pytest.mark.slow
def test_there_is_none_where_nothing_is_cut_or_batch_norm_would_change():
    lines = []
    assert plan_of(cfg_of(), lines, budget_gb=24).cost_model == ""
    assert "No cost model: no window is cut" in lines
    trains = cfg_of("COCO-Detection/retinanet_R_50_FPN_1x.yaml", "MODEL.RESNETS.NORM", "BN")
    trains.MEMFIT.MICRO_BATCH = 1
    assert plan_of(trains, lines, allow=["exact", "precision"]).cost_model == ""
    assert "No cost model: BatchNorm is trained on micro-batches" in lines


def test_a_batch_that_is_no_list_of_dataset_dicts_is_an_error():
    settings = {"MEMFIT.BUDGET_GB": BUDGET_GB}
    job = Job.from_cfg(cfg_of(), batch=(["pixels"], ["targets"])).with_settings(settings)
    with pytest.raises(ConfigError, match="a cost model is of dataset dicts"):
        CostFit(job, DeviceModel.load("cuda"), Padding(32))
