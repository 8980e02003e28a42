# Copyright (c) the d2_memfit developers.
"""Nothing is written outside of OUTPUT_DIR."""

import os
import sys

import pytest
from resumed import coins_cfg
from tiny import run_process


@pytest.mark.slow
def test_a_training_and_an_estimate_leave_the_home_folder_empty(coins, tmp_path):
    cfg = coins_cfg(tmp_path / "output", "faster_rcnn")
    cfg.SOLVER.ACCUMULATION_STEPS, cfg.SOLVER.MAX_ITER = 1, 3
    config_file, home = tmp_path / "tiny.yaml", tmp_path / "home"
    config_file.write_text(cfg.dump())
    home.mkdir()
    names = {"HOME": home, "XDG_CACHE_HOME": home, "XDG_CONFIG_HOME": home}
    environment = {**os.environ, **{name: str(path) for name, path in names.items()}}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    environment["MPLCONFIGDIR"] = str(tmp_path / "matplotlib")  # it keeps a list of fonts
    options = ["--config-file", config_file]
    options += ["--coco", "coins_train", coins / "train.json", coins / "train"]
    for arguments in (["train"], ["estimate", "--device", "cpu", "--details"]):
        command = [sys.executable, "-m", "d2_memfit", *arguments, *options]
        result = run_process(command, env=environment, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "output" / "memfit_peaks.json").exists()
    assert not list(home.iterdir())
    written = {path.name for path in tmp_path.iterdir()}
    assert written - {"matplotlib"} == {"home", "output", "tiny.yaml"}
