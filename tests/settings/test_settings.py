# Copyright (c) the d2_memfit developers.
"""Settings: what a run is told, checked in one place, in the words of whoever wrote it."""

import pytest
import torch
from lazy_configs import lazy_config
from tiny import tiny_cfg

from d2_memfit.cli import train
from d2_memfit.config import get_cfg, with_settings
from d2_memfit.engine.train_loop import AccumulatingTrainer
from d2_memfit.errors import ConfigError, one_line
from d2_memfit.job import Job
from d2_memfit.settings import NormalizerOptions, RecoveryOptions, Settings, check_settings
from d2_memfit.settings.detectron2_keys import DETECTRON2_CHECKS


def pieces(**arguments):
    return Job(model=lambda: torch.nn.Linear(1, 1), optimizer=torch.optim.Adam, **arguments)


def trainer(**arguments):
    model = torch.nn.Linear(1, 1)
    return AccumulatingTrainer(model, [], torch.optim.SGD(model.parameters(), 0.1), **arguments)


def of_cfg(**keys):
    settings = {key.replace("__", "."): value for key, value in keys.items()}
    return Job.from_cfg(with_settings(get_cfg(), settings))


def of_lazy(**train):
    return Job.from_lazy(lazy_config(**train))


STEPS, SIZE = "must be a positive integer, got 0", "must be a positive integer, got 1.5"
POLICY = "must be 'raise' or 'split', got 'wait'"
WAYS = {
    "yacs": (
        lambda: of_cfg(SOLVER__ACCUMULATION_STEPS=0, MEMFIT__MICRO_BATCH=1.5),
        [f"SOLVER.ACCUMULATION_STEPS {STEPS}", f"MEMFIT.MICRO_BATCH {SIZE}"],
    ),
    "LazyConfig": (
        lambda: of_lazy(accumulation_steps=0, micro_batch=1.5),
        [f"train.accumulation_steps {STEPS}", f"train.micro_batch {SIZE}"],
    ),
    "a Job of pieces": (
        lambda: pieces(accumulation_steps=0, micro_batch_size=1.5),
        [f"accumulation_steps {STEPS}", f"micro_batch_size {SIZE}"],
    ),
    "a trainer": (
        lambda: trainer(accumulation_steps=0, micro_batch_size=1.5),
        [f"accumulation_steps {STEPS}", f"micro_batch_size {SIZE}"],
    ),
    "nodes of a LazyConfig": (
        lambda: of_lazy(oom={"policy": "wait"}, memfit={"heads": {"chunk_size": 1.5}}),
        [f"train.oom.policy {POLICY}", f"train.memfit.heads.chunk_size {SIZE}"],
    ),
    "nodes of a Job": (
        lambda: pieces(memfit={"oom": {"policy": "wait"}, "monitor": {"leak_window": 3}}),
        [
            f"memfit.oom.policy {POLICY}",
            "memfit.monitor.leak_window must be an integer of at least 40, got 3",
        ],
    ),
    "an unknown key of a Job": (
        lambda: pieces(memfit={"oom": {"last_resor": "skip"}}),
        ["there is no config key memfit.oom.last_resor (did you mean memfit.oom.last_resort"],
    ),
    "options": (
        lambda: RecoveryOptions(allow_resize=0, last_resort="x"),
        [
            "allow_resize must be True or False, got 0",
            "last_resort must be 'raise' or 'skip', got 'x'",
        ],
    ),
    "images of pieces": (
        lambda: pieces(images_per_batch=-1, ranks=2),
        ["images_per_batch must be a positive integer, got -1"],
    ),
    "relations": (
        lambda: of_lazy(memfit={"plan": {"enabled": True}}),
        ["train.memfit.plan.enabled needs a train.budget_gb, or a train.memfit.preset"],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_wrong_comes_at_once_in_the_words_of_the_user(way):
    make, expected = WAYS[way]
    with pytest.raises(ConfigError) as e:
        make()
    lines = one_line(e.value).split("\n")
    assert len(lines) == len(expected)
    for line, text in zip(sorted(lines), sorted(expected)):
        assert line.startswith(text)


def test_the_keys_of_detectron2_are_in_the_same_list():
    cfg = get_cfg()
    cfg.SOLVER.STEPS, cfg.SOLVER.MAX_ITER, cfg.MEMFIT.OOM.POLICY = (9, 3), 0, "never\nmind"
    cfg.MODEL.PIXEL_STD = [1.0]
    with pytest.raises(ConfigError) as e:
        check_settings(cfg, 1, DETECTRON2_CHECKS)
    assert sorted(line.split()[0] for line in one_line(e.value).split("\n")) == [
        "MEMFIT.OOM.POLICY",
        "MODEL.PIXEL_STD",
        "SOLVER.MAX_ITER",
        "SOLVER.STEPS",
    ]


@pytest.mark.slow
def test_a_projects_trainer_may_have_other_choices(coins, tmp_path):
    class Trainer(train.Trainer):
        pass

    own = {
        "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "full_model",
        "SOLVER.LR_SCHEDULER_NAME": "WarmupPolyLR",
        "DATALOADER.SAMPLER_TRAIN": "ClassAwareSampler",
    }
    file = tmp_path / "config.yaml"
    file.write_text(with_settings(tiny_cfg(), own).dump())
    options = ["--config-file", str(file), "--training-only"]
    args = train.argument_parser().parse_args([*options, "DATASETS.TRAIN", "('coins_train',)"])
    with pytest.raises(ConfigError, match=r"SOLVER\.LR_SCHEDULER_NAME must be"):
        train.prepare(args)
    cfg, _ = train.prepare(args, Trainer)
    assert cfg.SOLVER.LR_SCHEDULER_NAME == "WarmupPolyLR"


def test_a_wrong_value_hides_only_what_depends_on_it():
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH, cfg.MEMFIT.BUDGET_GB, cfg.MEMFIT.PLAN.ENABLED = 0, -1, True
    with pytest.raises(ConfigError) as e:
        check_settings(cfg, 3)
    assert [line.split()[0] for line in str(e.value).split("\n")] == [
        "SOLVER.IMS_PER_BATCH",
        "MEMFIT.BUDGET_GB",
    ]


def test_what_is_parsed_has_types_and_is_made_once():
    cfg = tiny_cfg()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS = 4, 3
    cfg.MEMFIT.OOM.POLICY, cfg.MEMFIT.OOM.LAST_RESORT = "split", "skip"
    cfg.MEMFIT.NORMALIZERS.LOSSES = [["loss_mask*", "objects"], ["loss_total", "sum"]]
    job = Job.from_cfg(cfg, 2)
    assert (job.geometry.images_per_batch, job.geometry.window) == (2, 6)
    assert job.recovery.last_resort == "skip"
    assert list(job.normalizers.losses[1]) == ["loss_total", "sum"]
    assert job.with_settings({"MEMFIT.MICRO_BATCH": 1}).geometry.largest_micro_batch == 1
    assert not cfg.is_frozen()
    other = job.with_settings({"MEMFIT.OOM.POLICY": "raise"})
    assert (other.recovery, job.recovery.last_resort) == (None, "skip")


def test_settings_share_what_is_the_same_and_change_nothing():
    settings = Settings.from_cfg(tiny_cfg(), 1)
    changed = with_settings(settings.cfg, {"MEMFIT.OOM.POLICY": "split"})
    assert changed.MODEL is settings.cfg.MODEL
    assert (settings.cfg.MEMFIT.OOM.POLICY, changed.MEMFIT.OOM.POLICY) == ("raise", "split")
    assert changed.is_frozen()
    assert changed.MEMFIT.OOM.is_frozen()


def test_an_evaluation_does_not_read_the_keys_of_training():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH = 0, 3
    assert Settings.from_cfg(cfg, 2, trains=False).recovery is None
    cfg.MEMFIT.OOM.POLICY = "never"
    with pytest.raises(ConfigError, match=r"MEMFIT\.OOM\.POLICY must be 'raise' or 'split'"):
        Settings.from_cfg(cfg, 2, trains=False)


def test_only_counts_that_are_known_divide_losses():
    assert NormalizerOptions(losses=[["*", "sum"]]).losses == [["*", "sum"]]
    with pytest.raises(ConfigError, match=r'and "objects" or "sum", such as .*, got \[\['):
        NormalizerOptions(losses=[["a", "x"]])
