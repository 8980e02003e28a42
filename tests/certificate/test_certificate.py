# Copyright (c) the d2_memfit developers.
"""Certificates of real jobs, and runs that follow them."""

import dataclasses
import sys

import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.engine import hooks
from detectron2.utils.env import seed_all_rng
from forks import run_forked
from lazy_configs import lazy_config
from resumed import Trainer, coins_cfg

from d2_memfit import Job
from d2_memfit.certificate import Certificate, certify, follow
from d2_memfit.data import register_coco
from d2_memfit.engine import build_trainer
from d2_memfit.errors import ConfigError, DataError, MemfitError

pytestmark = pytest.mark.slow

ITERATIONS = 8
# The budget limits this process, so it is far more than that needs.
BUDGET_GB = 64
# Needs are no whole numbers, as those of fitted sums.
SUMS = [[6e10, 0.0, 150000.3, 1e7, 0.0, 0.0], [5.9e10, 1e8, 100000.3, 0.0, 5e3, 0.0]]


def cfg_of(folder, **keys):
    """A run of Coins, in windows of 6 images on each rank, that are cut by bytes."""
    run = {
        "SOLVER.MAX_ITER": ITERATIONS,
        "DATALOADER.NUM_WORKERS": 2,
        "INPUT.MIN_SIZE_TRAIN": (48, 64, 80),
        "INPUT.CROP.ENABLED": False,
    }
    memfit = {
        "MEMFIT.BUDGET_GB": BUDGET_GB,
        "MEMFIT.COST_MODEL.BYTES": SUMS,
        "MEMFIT.COST_MODEL.OVERHEAD_PIXELS": 1e5,  # so that few images go alone
        "MEMFIT.NORMALIZERS.POLICY": "off",
    }
    return coins_cfg(folder, "proposal_network", **{**run, **memfit, **keys})


@pytest.fixture(scope="module")
def cfg(coins, tmp_path_factory):
    return cfg_of(tmp_path_factory.mktemp("certified"))


@pytest.fixture(scope="module")
def certificate(cfg):
    return certify(Job.from_cfg(cfg))


def train(cfg, file, start=0, end=ITERATIONS):
    """What the windows of a run needed, by the sizes of their images."""
    seed_all_rng(start + 5)  # of what is drawn before
    cfg = cfg.clone()
    cfg.SOLVER.CHECKPOINT_PERIOD = end
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=start > 0)
    follow(trainer, file, trainer.start_iter)
    needs = []

    def after_step(trainer):
        needs.append(trainer._trainer.cutter.needs_bytes)
        if trainer.iter + 1 == end < ITERATIONS:
            raise KeyboardInterrupt

    trainer.register_hooks([hooks.CallbackHook(after_step=after_step)])
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert end < ITERATIONS
    return needs


def certified(certificate, rank=0):
    return certificate.needs_bytes[:, rank].tolist()


def assert_as_certified(needs, expected):
    """To the byte, as certificates are rounded up."""
    assert needs == pytest.approx(expected, abs=1)


def test_a_run_needs_what_is_certified(certificate, cfg, tmp_path, log):
    """The last window of the run is beyond its certificate."""
    shorter = dataclasses.replace(certificate, needs_bytes=certificate.needs_bytes[:-1])
    shorter.write(tmp_path / "c.pt")
    needs = train(cfg, tmp_path / "c.pt")
    assert_as_certified(needs, certified(certificate))
    assert len(set(needs)) > ITERATIONS / 2
    assert "The certificate held for 7 of 7 windows" in log.text


def test_a_window_that_does_not_fit_on_one_rank_is_too_large(certificate):
    needs = torch.tensor([[1, 3], [3, 3], [2, 2]])
    assert dataclasses.replace(certificate, needs_bytes=needs, limit_bytes=2).too_large == 2


def test_the_smallest_budget_is_that_of_the_largest_image_with_its_margin(cfg):
    cfg = cfg.clone()
    cfg.MEMFIT.PLAN.MARGIN, cfg.MEMFIT.COST_MODEL.ERROR_GB = 0.1, 0.5
    least_gb = certify(Job.from_cfg(cfg)).least_budget_gb
    cfg.MEMFIT.BUDGET_GB = least_gb
    assert certify(Job.from_cfg(cfg)).too_large == 0
    cfg.MEMFIT.BUDGET_GB = least_gb - 0.02
    too_small = certify(Job.from_cfg(cfg))
    assert too_small.too_large > 0
    assert too_small.answer().startswith(f"Does not fit: {too_small.too_large} of 8 windows of ")
    assert too_small.least_budget_gb == least_gb


def test_a_resumed_run_follows_it_too(certificate, cfg, tmp_path):
    certificate.write(tmp_path / "c.pt")
    cfg = cfg.clone()
    cfg.OUTPUT_DIR = str(tmp_path)
    needs = [*train(cfg, tmp_path / "c.pt", end=5), *train(cfg, tmp_path / "c.pt", start=5)]
    assert_as_certified(needs, certified(certificate))


def train_on_rank(rank, folder, *args):
    for split in ("train", "val"):
        if f"coins_{split}" not in DatasetCatalog:
            register_coco(f"coins_{split}", str(folder / f"{split}.json"), str(folder / split))
    return train(*args)


def test_two_ranks_follow_one_certificate(coins, two_ranks, tmp_path):
    cfg = cfg_of(tmp_path, **{"SOLVER.IMS_PER_BATCH": 4})
    certificate = certify(Job.from_cfg(cfg, ranks=2))
    certificate.write(tmp_path / "c.pt")
    first = two_ranks.run(train_on_rank, coins, cfg, tmp_path / "c.pt", 0, 5)
    rest = two_ranks.run(train_on_rank, coins, cfg, tmp_path / "c.pt", 5)
    for rank in range(2):
        assert_as_certified([*first[rank], *rest[rank]], certified(certificate, rank))
    assert certified(certificate, 0) != certified(certificate, 1)


def test_a_lazy_config(coins, tmp_path):
    cfg = lazy_config(memfit={"cost_model": {"bytes": SUMS}}, budget_gb=BUDGET_GB, max_iter=3)
    cfg.dataloader.train.dataset.names = "coins_train"
    cfg.dataloader.train.num_workers = 1
    cfg.dataloader.train.mapper.augmentations[0].short_edge_length = (48, 64, 80)
    cfg.dataloader.train.mapper.augmentations[0].sample_style = "choice"
    cfg.train.output_dir = str(tmp_path)
    job = Job.from_lazy(cfg)
    certificate = certify(job)
    certificate.write(tmp_path / "c.pt")
    trainer = build_trainer(job)
    follow(trainer, tmp_path / "c.pt")
    needs = []
    note = hooks.CallbackHook(after_step=lambda t: needs.append(t.cutter.needs_bytes))
    trainer.register_hooks([note])
    trainer.train(0, 3)
    assert_as_certified(needs, certified(certificate))


def test_what_is_not_certified_is_said(certificate, cfg, tmp_path, log):
    less = dataclasses.replace(certificate, needs_bytes=certificate.needs_bytes - 10)
    less.write(tmp_path / "c.pt")
    train(cfg, tmp_path / "c.pt", end=3)
    assert log.text.count("the images are not those of the certificate") == 1
    assert "held for 0 of 3 windows" in log.text


@pytest.mark.parametrize("device", ["cpu", "rtx_3060"])
def test_a_certificate_is_read_as_it_was_written(cfg, tmp_path, device):
    certificate = certify(Job.from_cfg(cfg), device=device)
    assert (certificate.hours is not None) == (device != "cpu")
    certificate.write(tmp_path / "c.pt")
    read = Certificate.read(tmp_path / "c.pt")
    assert torch.equal(read.needs_bytes, certificate.needs_bytes)
    assert read.worst == certificate.worst
    assert str(read) == str(certificate)


def test_its_text(certificate):
    lines = str(certificate).splitlines()
    most = max(certified(certificate))
    where = certified(certificate).index(most)
    limit = certificate.limit_bytes / 2**30
    answer = certificate.answer().splitlines()
    assert answer[0] == (
        "Fits: none of 8 windows of 6 images on 1 GPU needs more than "
        f"{most / 2**30:.2f} of {limit:.2f} GB"
    )
    assert answer[1].startswith("That is what a budget of 64.00 GB leaves. The smallest budget ")
    assert "as they will be drawn (16 were loaded and compared)" in lines[0]
    counts = [line for line in lines if "#" in line]
    assert sum(int(line.split(" GB")[1].split()[0]) for line in counts) == ITERATIONS
    assert f"iteration {where}: " in next(line for line in lines if "iteration" in line[10:])


def test_its_order_is_that_of_the_seed(certificate, cfg):
    assert torch.equal(certify(Job.from_cfg(cfg)).needs_bytes, certificate.needs_bytes)
    other = cfg.clone()
    other.SEED = 2
    assert not torch.equal(certify(Job.from_cfg(other)).needs_bytes, certificate.needs_bytes)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MEMFIT.COST_MODEL.BYTES": []}, "d2-memfit plan --cost-model writes it"),
        ({"DATALOADER.NUM_WORKERS": 0}, "Set it to 1 or more"),
    ],
)
def test_what_cannot_be_certified_is_an_error(coins, tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        certify(Job.from_cfg(cfg_of(tmp_path, **keys)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MEMFIT.BUDGET_GB": 65}, "is for another budget or MEMFIT.COST_MODEL"),
        ({"DATALOADER.NUM_WORKERS": 1}, "is for a loader with other numbers"),
        ({"SOLVER.IMS_PER_BATCH": 3}, "is for a loader with other numbers"),
        ({"DATASETS.TRAIN": ("coins_val",)}, "is for another dataset"),
    ],
)
def test_a_certificate_of_another_run_is_an_error(certificate, cfg, tmp_path, keys, message):
    certificate.write(tmp_path / "c.pt")
    cfg = cfg_of(tmp_path, **keys)
    with pytest.raises(ConfigError, match=message):
        train(cfg, tmp_path / "c.pt")


def test_a_run_that_began_without_it_is_an_error(certificate, cfg, tmp_path, monkeypatch):
    certificate.write(tmp_path / "c.pt")
    cfg = cfg_of(tmp_path, SEED=4)
    with monkeypatch.context() as without:
        without.setattr(sys.modules[__name__], "follow", lambda *args: None)
        train(cfg, tmp_path / "c.pt", end=2)
    with pytest.raises(ConfigError, match="was started without it"):
        train(cfg, tmp_path / "c.pt", start=2)


def test_ranks_are_those_of_the_certificate(certificate, cfg, tmp_path):
    needs = certificate.needs_bytes.repeat(1, 2)
    dataclasses.replace(certificate, needs_bytes=needs).write(tmp_path / "c.pt")
    with pytest.raises(ConfigError, match="is for 2 ranks, but this run has 1"):
        train(cfg, tmp_path / "c.pt")


@pytest.mark.parametrize("content", [b"", b"text", None])
def test_what_is_not_a_certificate_is_an_error(tmp_path, content):
    file = tmp_path / "c.pt"
    if content is not None:
        file.write_bytes(content)
    missing = r"--certificate .*c.pt cannot be read \(No such file"
    other = r"--certificate .*c.pt is not a file of d2-memfit certify, or damaged \("
    with pytest.raises(MemfitError, match=missing if content is None else other):
        Certificate.read(file)
    torch.save({"model": {}}, file)
    with pytest.raises(DataError, match=r"--certificate .*c.pt: the field needs_bytes is missing"):
        Certificate.read(file)


def test_changed_bytes_are_found_by_the_checksums(certificate, tmp_path):
    certificate.write(tmp_path / "c.pt")
    whole = (tmp_path / "c.pt").read_bytes()
    for place in range(len(whole) // 7, len(whole), len(whole) // 5):
        changed = bytearray(whole)
        changed[place] ^= 4
        (tmp_path / "changed.pt").write_bytes(changed)
        with pytest.raises(MemfitError, match=r"changed\.pt (is not a file|: )"):
            Certificate.read(tmp_path / "changed.pt")


@pytest.mark.parametrize("part", ["layout", "rest", "sampler"])
def test_a_part_of_the_datas_order_that_is_missing_is_named(certificate, cfg, tmp_path, part):
    stream = {k: v for k, v in certificate.stream.items() if k != part}
    dataclasses.replace(certificate, stream=stream).write(tmp_path / "c.pt")
    message = rf"c\.pt is for another dataset, or damaged: KeyError\('{part}'\)"
    with pytest.raises(ConfigError, match=message):
        train(cfg, tmp_path / "c.pt")


def test_the_package_works_without_this_room():
    """All other modules can be imported where it was deleted."""
    code = """
import importlib, pkgutil, sys
sys.modules["d2_memfit.certificate"] = None
import d2_memfit
for module in pkgutil.walk_packages(d2_memfit.__path__, "d2_memfit."):
    if not module.name.startswith("d2_memfit.certificate") and "__main__" not in module.name:
        importlib.import_module(module.name)
"""
    result = run_forked("-c", code)
    assert result.returncode == 0, result.stderr
