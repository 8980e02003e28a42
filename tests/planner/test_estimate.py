# Copyright (c) the d2_memfit developers.
"""Estimates from few dry runs: lines, ranges, headroom, objects."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from benchmarks.detr_like import add_detr_config
from tiny import images, sized, tiny_cfg

from d2_memfit import Job, estimate_memory
from d2_memfit.planner.device import DeviceModel, DeviceUse
from d2_memfit.planner.estimate import MOST_OBJECTS, DryJob
from d2_memfit.planner.timeline import Timeline

GB, MB = 2**30, 2**20
CUDA = DeviceModel.load("cuda")


def dry_job(cfg, num_images, **batch):
    cfg.SOLVER.IMS_PER_BATCH = num_images
    return DryJob(Job.from_cfg(cfg, 1, **batch), CUDA, evaluates=False)


def crowded_cfg(family="mask_rcnn"):
    """A DETR whose memory depends on objects."""
    cfg = tiny_cfg(family)
    add_detr_config(cfg)
    cfg.MODEL.META_ARCHITECTURE, cfg.INPUT.MASK_FORMAT = "SmallDetr", "bitmask"
    cfg.MODEL.DETR.NUM_OBJECT_QUERIES = 400
    return cfg


@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn", "crowded"])
def test_more_images_are_on_lines_through_2_and_3(name):
    """To a thousandth, with the phase that decides, and with gradients of earlier ones."""
    cfg = crowded_cfg() if name == "crowded" else tiny_cfg(name, fpn=name == "mask_rcnn")
    job = dry_job(cfg, 9, **sized(cfg, (800, 1200), 10))
    job.expandable_segments = True  # as under a budget
    for num_images in (9, 6):
        expected = job.expected_use(num_images)
        job.whole(num_images)
        use = job.use(num_images)
        assert expected.allocated_bytes == pytest.approx(use.allocated_bytes, rel=0.001)
        assert expected.total_bytes == pytest.approx(use.total_bytes, rel=0.05)
        assert sum(expected.breakdown.values()) == pytest.approx(use.allocated_bytes, rel=0.01)
        assert expected.breakdown["gradients"] == pytest.approx(use.breakdown["gradients"], 0.2)


def test_the_sum_of_all_owners_is_on_the_line_though_some_are_below_0(monkeypatch):
    cfg = tiny_cfg("retinanet", fpn=False)
    job = dry_job(cfg, 5, **sized(cfg, (64, 64), 2))
    owners = Counter({"activations": 900 * MB, "workspace": -300 * MB})
    monkeypatch.setattr(job, "_places_of", lambda _: {("forward", "", ""): owners})
    use = job.expected_use(5)
    assert use.allocated_bytes == 600 * MB + use.breakdown["rounding"]
    assert min(use.breakdown.values()) >= 0


def test_images_of_a_user_that_differ_are_all_run():
    batch = [*images(3, size=64), *images(1, size=128)]
    job = dry_job(tiny_cfg("proposal_network", fpn=False), 4, batch=batch)
    largest = dry_job(tiny_cfg("proposal_network", fpn=False), 4, batch=images(4, size=128))
    assert job.use().allocated_bytes > 0.9 * largest.use().allocated_bytes
    assert job.expected_use(4) == job.use()


def test_the_headroom_is_what_other_software_and_another_context_may_add():
    for name, share, context in (("cuda", 0.06, 206), ("h100", 0.06, 106), ("cpu", 0.02, 140)):
        assert DeviceModel.load(name).margin == (share, pytest.approx(context * MB, abs=MB))


@pytest.mark.parametrize(("between", "needed"), [(10, 100 + 6 + 206), (500, 600)])
def test_a_budget_has_the_headroom_and_what_the_allocator_keeps(between, needed):
    job = dry_job(tiny_cfg("retinanet", fpn=False), 1)
    outside = Counter({"between blocks": between * MB, "context": 400 * MB})
    use = DeviceUse(Counter(activations=100 * MB), outside)
    assert job.budget_bytes(use) == pytest.approx((needed + 400) * MB, abs=MB)


def test_a_range_says_what_makes_it_wider():
    cfg = tiny_cfg("mask_rcnn", device="cuda")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("nobody_has_it",), ()
    unknown = estimate_memory(cfg, 1, "cuda")
    told = estimate_memory(cfg, 1, "cuda", image_size=(64, 64), num_instances=5)
    assert any("the shape of the images" in line for line in unknown.wider)
    assert unknown.range_gb[0] < 0.94 * unknown.typical_gb < 0.94 * unknown.peak_allocated_gb
    assert not any("shape" in line for line in told.wider)
    assert told.typical_gb is None
    for e in (unknown, told):
        low, high = e.range_gb
        assert low < 0.94 * e.peak_allocated_gb
        assert high >= 1.0599 * e.peak_allocated_gb


def test_each_thing_that_is_not_known_has_its_part_of_the_range(monkeypatch):
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 512
    job = dry_job(cfg, 2, **sized(cfg, (64, 64), 5))
    worst = job.use().allocated_bytes
    margin = 0.06 * worst

    def parts(**device):
        job.device = replace(CUDA, **device)
        return [abs(gb * GB - worst) for gb in job.estimate().range_gb]

    job.whole().offloaded += [3 * MB, 4 * MB]  # the host's allocator has powers of two
    assert job.estimate().offloaded_gb * GB == 8 * MB
    below, above = parts()
    assert below > 2 * margin  # few proposals may be on objects
    assert above == pytest.approx(margin)
    assert parts(card_is_known=False)[1] == pytest.approx(math.hypot(margin, worst / 2))
    gradients = job.session.gradient_bytes
    assert parts(release_is_known=False)[1] == pytest.approx(math.hypot(margin, gradients))
    monkeypatch.setattr(Timeline, "more_with_other_algorithms", lambda _: worst)
    assert parts()[1] == pytest.approx(margin + worst, rel=0.05)
    cfg = crowded_cfg()
    cfg.DATASETS.TRAIN = ("nobody_has_it",)
    e = dry_job(cfg, 1, image_size=(64, 64)).estimate()
    assert "most images have fewer objects" in e.wider
    assert e.range_gb[0] < 0.94 * e.typical_gb < 0.94 * e.peak_allocated_gb
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    for name, is_crowded in {"lvis_v1_train": True, "coco_2017_train": False}.items():
        cfg.DATASETS.TRAIN = (name,)
        wider = dry_job(cfg, 2, image_size=(640, 640)).estimate().wider
        assert ("most images have fewer objects" in wider) is is_crowded


def test_an_evaluation_has_to_fit_too():
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.INPUT.MIN_SIZE_TEST = cfg.INPUT.MAX_SIZE_TEST = 2000
    job = DryJob(Job.from_cfg(cfg, 1), CUDA)
    training, evaluation = (job.budget_bytes(use) / GB for use in job.uses())
    assert training < 0.9 * evaluation
    assert not job.fits((training + evaluation) / 2)
    assert not job.fits(evaluation - 0.01)
    assert job.fits(evaluation + 0.01)


@pytest.mark.parametrize(("num_images", "own"), [(1, 3), (4, 20)])
def test_objects_that_fit_are_on_lines_of_an_image(num_images, own):
    job = dry_job(crowded_cfg(), num_images, num_instances=own)
    budget_gb = dry_job(crowded_cfg(), num_images, num_instances=200)
    budget_gb = budget_gb.budget_bytes(budget_gb.use()) / GB
    assert 150 < job.objects_that_fit(budget_gb) < 300  # about 200
    assert job.objects_that_fit(100) == MOST_OBJECTS


def test_what_has_no_objects_has_no_answer_and_one_may_be_too_many():
    cfg = tiny_cfg("proposal_network", fpn=False)
    empty = images(1, num_instances=3)[0]["image"]
    assert dry_job(cfg, 1, batch=[{"image": empty}]).objects_that_fit(6) is None
    assert dry_job(cfg, 1, num_instances=3).objects_that_fit(0.2) == 0
