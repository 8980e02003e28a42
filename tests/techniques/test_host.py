# Copyright (c) the d2_memfit developers.
import os
import tempfile

import psutil
import pytest
from detectron2.data import build_detection_train_loader
from lazy_configs import lazy_config
from tiny import tiny_cfg

from d2_memfit.common.errors import HostMemoryError
from d2_memfit.engine.build import build_trainer
from d2_memfit.job import Job, checked_loader
from d2_memfit.techniques.host import SharedList
from d2_memfit.techniques.registry import apply_techniques

GB = 2**30


def plan(budget_gb):
    """The config that comes out."""
    cfg = tiny_cfg(fpn=False)
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (800,), 1333
    cfg.DATALOADER.NUM_WORKERS = 8
    cfg.MEMFIT.HOST.BUDGET_GB = budget_gb
    cfg.freeze()
    return apply_techniques("config", cfg, cfg)


def own_gb():
    return psutil.Process().memory_info().rss / GB


def test_workers_are_as_many_as_fit(log, monkeypatch):
    assert plan(own_gb() + 10).DATALOADER.NUM_WORKERS == 8
    cfg = plan(own_gb() + 1.0)
    assert 1 <= cfg.DATALOADER.NUM_WORKERS <= 3
    assert f"DATALOADER.NUM_WORKERS {cfg.DATALOADER.NUM_WORKERS} of 8" in log.text
    assert cfg.is_frozen()
    monkeypatch.setattr("d2_memfit.techniques.host.figures_of_plan", lambda _: {"offloaded_gb": 9})
    assert 1 <= plan(own_gb() + 10).DATALOADER.NUM_WORKERS <= 3


def test_a_trainer_decides_once(coins, log):
    cfg = tiny_cfg(fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATALOADER.NUM_WORKERS = ("coins_train",), 8
    cfg.MEMFIT.HOST.BUDGET_GB = own_gb() / 2
    loader = build_trainer(Job.from_cfg(cfg)).data_loader
    assert log.text.count("DATALOADER.NUM_WORKERS 0 of 8") == 1
    assert getattr(loader, "dataset", loader).num_workers == 0


def test_the_workers_of_a_lazy_config_are_lowered(coins, log):
    cfg = lazy_config(memfit={"host": {"budget_gb": own_gb() / 2}})
    cfg.dataloader.train.dataset.names, cfg.dataloader.train.num_workers = "coins_train", 8
    loader = build_trainer(Job.from_lazy(cfg)).data_loader
    assert "DATALOADER.NUM_WORKERS 0 of 8" in log.text
    assert getattr(loader, "dataset", loader).num_workers == 0


ITEMS = [{"file_name": f"{i}.png", "annotations": [{"bbox": [i, 1, 2, 3]}] * i} for i in range(20)]


def leftovers():
    return [f for f in os.listdir(tempfile.gettempdir()) if f.startswith("d2_memfit_dataset_")]


def test_items_are_those_that_went_in_and_no_file_is_left():
    before = leftovers()
    shared = SharedList(ITEMS)
    assert len(shared) == len(ITEMS)
    assert [shared[i] for i in range(len(shared))] == ITEMS
    assert shared[3] is not shared[3]
    assert leftovers() == before


def make_on_rank(rank):
    shared = SharedList(ITEMS if rank == 0 else [])  # only the first rank's items count
    with open("/proc/self/maps") as f:
        (inode,) = {line.split()[4] for line in f if "d2_memfit_dataset_" in line}
    return [shared[i] for i in range(len(shared))], inode


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux shows maps")
def test_ranks_map_one_file(two_ranks):
    before = leftovers()
    (first, first_inode), (second, second_inode) = two_ranks.run(make_on_rank)
    assert first == second == ITEMS
    assert first_inode == second_inode
    assert leftovers() == before


def test_the_loader_gives_the_same_images(coins):
    cfg = tiny_cfg("mask_rcnn")
    cfg.DATASETS.TRAIN = ("coins_train",)
    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.MEMFIT.HOST.SHARED_DATASET = True
    build = apply_techniques("loader", checked_loader(build_detection_train_loader, cfg), cfg)
    loader = build(cfg)
    dataset = loader.dataset.dataset
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    while hasattr(dataset, "_dataset"):
        dataset = dataset._dataset
    assert isinstance(dataset._lst, SharedList)
    batch = next(iter(loader))
    assert {os.path.dirname(image["file_name"]) for image in batch} == {str(coins / "train")}


def test_a_folder_without_room_is_an_error_that_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(HostMemoryError, match=r"SHARED_DATASET: cannot write .*missing.*TMPDIR"):
        SharedList(ITEMS)


def share_what_cannot_be_pickled(rank):
    with pytest.raises(HostMemoryError, match=r"SHARED_DATASET: cannot write .*pickle"):
        SharedList([lambda: None])


def test_an_error_of_one_rank_is_one_of_all(two_ranks):
    before = leftovers()
    two_ranks.run(share_what_cannot_be_pickled)
    assert leftovers() == before
