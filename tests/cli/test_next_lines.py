# Copyright (c) the d2_memfit developers.
"""The line "Next" of each command works when it is pasted, and leads to the next one."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
from pasted import paste
from tiny import tiny_cfg

from d2_memfit.cli.command_line import main
from d2_memfit.cli.plan import _what_fits

SHORT = ["SOLVER.MAX_ITER", "1", "DATALOADER.NUM_WORKERS", "0", "SOLVER.IMS_PER_BATCH", "2"]


@pytest.fixture
def config_file(tmp_path):
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.DATASETS.TEST = ()
    (tmp_path / "tiny.yaml").write_text(cfg.dump())
    return str(tmp_path / "tiny.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["estimate", "doctor"])
def test_from_a_job_to_its_predictions(config_file, coins, tmp_path, capsys, command):
    data = [["--coco", f"next_{s}", f"{coins}/{s}.json", f"{coins}/{s}"] for s in ("train", "val")]
    main([command, "--config-file", config_file, *data[0], *data[1], *SHORT])
    planned = paste(capsys.readouterr().out, tmp_path)
    assert planned.startswith("Fits: ")
    trained = paste(planned, tmp_path, "OUTPUT_DIR", "output")
    found = paste(trained, tmp_path)
    assert "Written: predictions/pictures" in found


@pytest.mark.slow
def test_what_does_not_fit_leads_to_what_does(config_file, tmp_path, capsys):
    """A plan that must be allowed more, and one that needs more memory."""
    size = ["INPUT.MIN_SIZE_TRAIN", "(800,)", "INPUT.MAX_SIZE_TRAIN", "1333"]
    job = ["--config-file", config_file, "--device", "cuda"]
    main(["estimate", *job, "--json", *size, *SHORT])
    less_gb = str(0.9 * json.loads(capsys.readouterr().out)["device_total_gb"])
    for options in (["--allow", "recipe", "--budget", less_gb], ["--budget", "0.2"]):
        folder = tmp_path / options[0]
        folder.mkdir()
        with pytest.raises(SystemExit, match="3"):
            main(["plan", *job, *options, *size, *SHORT])
        assert paste(printed := capsys.readouterr().out, folder).startswith("Fits: ")
        assert ("--allow exact " in printed) is (options[0] == "--allow")


@pytest.mark.parametrize(
    ("file", "opts", "left"),
    [
        ("a.yaml", "MEMFIT.BUDGET_GB 1 SEED 2 MEMFIT.PRESET 6GB", ["SEED", "2"]),
        ("a.py", "+train.memfit.budget_gb=1 train.max_iter=2", ["train.max_iter=2"]),
    ],
)
def test_a_job_that_fits_nowhere_is_tried_with_its_smallest_budget_only(file, opts, left):
    args = Namespace(config_file=file, opts=opts.split())
    plan = SimpleNamespace(fits=False, must_allow=[], smallest_budget_gb=3.2)
    assert _what_fits(args, plan) == {"card": None, "budget": 3.2, "opts": left}
    plan.must_allow = ["exact", "recipe"]
    assert _what_fits(args, plan) == {"allow": "exact,recipe"}
