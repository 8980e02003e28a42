# Copyright (c) the d2_memfit developers.
"""The most objects with which a job fits."""

import pytest
from benchmarks.detr_like import add_detr_config
from tiny import images, tiny_cfg

from d2_memfit import Job
from d2_memfit.errors import ConfigError
from d2_memfit.job import WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, MostObjects, objects, objects_that_fit

CUDA = DeviceModel.load("cuda")


def detr_cfg():
    cfg = tiny_cfg("mask_rcnn")
    add_detr_config(cfg)
    cfg.MODEL.META_ARCHITECTURE, cfg.INPUT.MASK_FORMAT = "SmallDetr", "bitmask"
    cfg.MODEL.DETR.NUM_OBJECT_QUERIES = 400
    cfg.SOLVER.IMS_PER_BATCH = 2
    return cfg


def dry_job(cfg, num):
    return DryJob(Job.from_cfg(cfg, 1, num_instances=num), CUDA, evaluates=False)


def find(dry_job, limit):
    return objects_that_fit(dry_job, limit, lambda job: job.fits(limit))


@pytest.mark.slow
def test_the_numbers_are_those_of_separate_estimates(monkeypatch):
    monkeypatch.setattr(objects, "_BOUND_BY_OBJECTS", ())
    limit = dry_job(detr_cfg(), 100).total_bytes()
    most = find(dry_job(detr_cfg(), 3), limit).as_it_is
    assert 3 < most.fits < most.does_not_fit < 300
    assert most.does_not_fit - most.fits <= max(0.2 * most.fits, 1)
    assert dry_job(detr_cfg(), most.fits).fits(limit)
    assert not dry_job(detr_cfg(), most.does_not_fit).fits(limit)


@pytest.mark.slow
def test_with_techniques_more_objects_fit():
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 1
    job = Job.from_cfg(cfg, 1, batch=WorstCase((800, 1200), 20))
    limit = DryJob(
        Job.from_cfg(cfg, 1, batch=WorstCase((800, 1200), 500)), CUDA, evaluates=False
    ).least_bytes()
    found = find(DryJob(job, CUDA, evaluates=False), limit)
    assert 20 < found.as_it_is.fits < found.as_it_is.does_not_fit < 1000
    assert found.with_techniques == MostObjects(1000, None)
    assert found.settings == {"MEMFIT.MATCHING.CHUNK_SIZE": 4096}
    crowded = Job.from_cfg(cfg, 1, batch=WorstCase((800, 1200), 1000))
    assert DryJob(crowded.with_settings(found.settings), CUDA, evaluates=False).fits(limit)
    assert not DryJob(crowded, CUDA, evaluates=False).fits(limit)


def test_with_much_memory_the_answer_is_a_lower_bound():
    found = find(dry_job(tiny_cfg("proposal_network", fpn=False), 3), 8 * 2**30)
    assert found.as_it_is == MostObjects(1000, None)
    assert (found.with_techniques, found.settings) == (None, {})


def test_a_job_that_already_has_more_objects_is_not_tried_with_fewer(monkeypatch):
    job = dry_job(tiny_cfg("proposal_network", fpn=False), 1100)
    monkeypatch.setattr(DryJob, "with_batch", None)
    assert find(job, 8 * 2**30).as_it_is == MostObjects(1100, None)


def test_nothing_fits_if_one_object_is_too_many():
    found = find(dry_job(tiny_cfg("proposal_network", fpn=False), 3), 2**29)  # less than a context
    assert found.as_it_is == MostObjects(0, 1)
    assert found.with_techniques is None


def test_masks_take_no_more_ram_than_there_is(monkeypatch):
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 2
    job = Job.from_cfg(cfg, 1, batch=images(2, num_instances=3))
    masks_of_an_object = 2 * 64 * 64
    monkeypatch.setattr(objects, "available_host_bytes", lambda: 4 * 40 * masks_of_an_object)
    found = find(DryJob(job, CUDA, evaluates=False), 8 * 2**30)
    assert 35 <= found.as_it_is.fits <= 40  # keypoints take RAM, too
    assert found.as_it_is.does_not_fit is None


def test_images_without_objects_have_no_answer():
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    empty = images(1, num_instances=3)
    job = DryJob(Job.from_cfg(cfg, 1, batch=empty), CUDA, evaluates=False)
    job.job = Job.from_cfg(cfg, 1, batch=[{"image": empty[0]["image"]}])
    assert find(job, 8 * 2**30) is None


def test_a_job_that_does_not_run_with_other_numbers_has_no_answer(monkeypatch, log):
    job = dry_job(tiny_cfg("proposal_network", fpn=False), 3)

    def refuse(self, batch, settings):
        raise ConfigError("only 3 objects")

    monkeypatch.setattr(DryJob, "with_batch", refuse)
    assert find(job, 8 * 2**30) is None


@pytest.mark.parametrize(
    "needs",
    [
        lambda n: max(1000, 700 + n),
        lambda n: 100 + n**2,
        lambda n: 1000 if n < 444 else 9000,
        lambda n: 300 + 5 * n,
    ],
)
@pytest.mark.parametrize("known", [{}, {90: None}, {1500: None}])
@pytest.mark.parametrize("limit", [1001, 1400, 9400])
def test_few_dry_runs_enclose_the_number(needs, known, limit):
    tried = []

    def excess(num):
        tried.append(num)
        return needs(num) - limit

    most = objects._most(excess, {num: needs(num) - limit for num in known}, 2000)
    assert len(tried) <= 6
    if most.fits:
        assert needs(most.fits) <= limit
        assert {most.fits} <= {*tried, *known}
    if most.does_not_fit is None:
        assert most.fits == 2000
    else:
        assert needs(most.does_not_fit) > limit
        assert {most.does_not_fit} <= {*tried, *known}
