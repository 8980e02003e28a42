# Copyright (c) the d2_memfit developers.
"""The command with a project's trainer, with batches of one's own, and with LazyConfigs."""

import json
import sys
from argparse import Namespace

import pytest
from detectron2.config import LazyConfig
from tiny import tiny_cfg

from d2_memfit import Job
from d2_memfit.cli.command_line import main
from d2_memfit.cli.plan import next_train

PROJECT = """
import torch
from detectron2.config import get_cfg
from detectron2.engine import DefaultTrainer
from tiny import tiny_cfg
from d2_memfit import Job


def own_cfg():
    cfg = get_cfg()
    cfg.MODEL.OWN_KEY = 1
    return cfg


class Trainer(DefaultTrainer):
    @classmethod
    def build_optimizer(cls, cfg, model):
        return torch.optim.AdamW(model.parameters())


def largest_batch(cfg):
    small = tiny_cfg("proposal_network", fpn=False)
    return Job.from_cfg(small, 1, num_instances=3).training_batch(1)


def no_batch(cfg):
    return None
"""

SCRIPT = """
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.projects.point_rend import add_pointrend_config


def add_own_config(cfg):
    cfg.MODEL.OWN = CfgNode({"KEY": cfg.MODEL.POINT_HEAD.NUM_FC})


class Trainer(DefaultTrainer):
    pass
"""

LAZY = """
from lazy_configs import lazy_config

_cfg = lazy_config()
_cfg.model.cfg.fpn = False
globals().update({name: _cfg[name] for name in _cfg})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "project_of_test.py").write_text(PROJECT)
    (tmp_path / "train_net.py").write_text(SCRIPT)
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.DATASETS.TEST, cfg.SOLVER.IMS_PER_BATCH = (), 2
    (tmp_path / "tiny.yaml").write_text(cfg.dump())
    (tmp_path / "own.yaml").write_text("_BASE_: tiny.yaml\nMODEL: {OWN: {KEY: 2}}\n")
    (tmp_path / "lazy.py").write_text(LAZY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("project_of_test", "train_net"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def answer(capsys, *arguments):
    main([*arguments, "--json", "MODEL.DEVICE", "cpu"])
    return json.loads(capsys.readouterr().out)


def test_the_script_that_trains_a_plan_gets_its_data():
    data = ["--coco", "my_train", "train.json", "images/"]
    args = Namespace(output="plan.yaml", coco=[data[1:]], project=[], trainer="a.b:C")
    command = ["python", "YOUR_SCRIPT.py", "--config-file", "plan.yaml", *data]
    assert next_train(args, 1).splitlines()[-1].split() == command


def test_a_trainer_and_its_keys_are_found_in_another_folder(folder, capsys):
    (folder / "elsewhere").mkdir()
    (folder / "train_net.py").rename(folder / "elsewhere" / "train_net.py")
    estimate = ["estimate", "--config-file", "own.yaml", "--trainer", "train_net:Trainer"]
    main([*estimate, "--project", "elsewhere", "--json", "--device", "cpu"])
    assert json.loads(capsys.readouterr().out)["peak_allocated_gb"] < 1


def test_the_optimizer_of_a_trainer_counts(folder, capsys):
    trainer = ["--trainer", "project_of_test:Trainer"]
    own = answer(capsys, "estimate", "--config-file", "tiny.yaml", *trainer)
    assert own["breakdown"]["optimizer"] > 1.9 * own["breakdown"]["parameters"]  # AdamW's moments
    plan = answer(capsys, "plan", "--config-file", "tiny.yaml", *trainer, "--budget", "20")
    assert plan["fits"]


def test_a_function_that_returns_a_config_is_a_project(folder, capsys):
    project = ["--project", "project_of_test:own_cfg", "--config-file", "tiny.yaml"]
    main(["estimate", *project, "--json", "MODEL.OWN_KEY", "2"])
    assert json.loads(capsys.readouterr().out)["peak_allocated_gb"] < 1  # its tiny model


def test_a_key_of_a_project_needs_its_function(folder, capsys):
    with pytest.raises(SystemExit):
        main(["estimate", "--config-file", "own.yaml", "--device", "cpu"])
    message = capsys.readouterr().err
    assert "own.yaml: there is no config key MODEL.OWN" in message
    assert "--project MODULE:FUNCTION" in message


def test_batches_sizes_and_instances_can_be_given(folder, capsys):
    config = ["estimate", "--config-file", "tiny.yaml"]
    given = answer(capsys, *config, "--batch", "project_of_test:largest_batch")
    assert given["num_instances"] == 3
    asked = answer(capsys, *config, "--image-size", "480,640", "--instances", "7")
    assert asked["num_instances"] == 7
    assert asked["image_size"] == [64, 85]
    for option, value, message in [
        ("--batch", "project_of_test:no_batch", "batch must be a list"),
        ("--image-size", "large", "--image-size: must be a height and a width in pixels"),
        ("--instances", "0", "--instances: must be a positive integer, got '0'"),
    ]:
        with pytest.raises(SystemExit) as e:
            main([*config, option, value])
        assert e.value.code == 2
        assert message in capsys.readouterr().err


def test_training_can_be_planned_by_itself(folder, capsys):
    config = ["estimate", "--config-file", "tiny.yaml", "--training-only"]
    e = answer(capsys, *config)
    assert e["evaluation_gb"] is None
    assert not any("DATASETS.TEST" in line for line in e["assumptions"])


def test_a_lazy_config_is_planned_and_its_plan_is_a_lazy_config(folder, capsys):
    config = ["plan", "--config-file", "lazy.py", "--budget", "20", "--device", "cpu"]
    main([*config, "--details", "--output", "planned.py", "train.accumulation_steps=2"])
    assert "SOLVER.ACCUMULATION_STEPS 2, as before" in capsys.readouterr().out
    planned = LazyConfig.load("planned.py")
    assert planned.train.memfit.budget_gb == 20
    assert planned.train.accumulation_steps == 2
    job = Job.from_lazy(planned, 1)
    assert job.budget_gb == 20
    assert job.cfg.MEMFIT.OOM.POLICY == "split"
    job.build_optimizer(job.build_model())
    with pytest.raises(SystemExit):
        main([*config, "--output", "x.yaml"])
    assert "is a .py file, use x.py" in capsys.readouterr().err
    main(["estimate", "--config-file", "lazy.py", "--card", "24GB", "--device", "cpu"])


@pytest.mark.parametrize(
    "words",
    [
        "lazy.py --trainer a:B",
        "lazy.py train.no",
        "tiny.yaml --trainer project_of_test:T",
        "tiny.yaml --trainer nowhere:C",
    ],
)
def test_bad_input_is_one_line(folder, prose, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", "--config-file", *words.split(" ")])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    prose(printed)
