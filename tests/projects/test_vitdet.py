# Copyright (c) the d2_memfit developers.
"""LazyConfigs: a Mask R-CNN on both releases of Detectron2, and ViTDet where there is one."""

import importlib.util
import re
from pathlib import Path

import detectron2
import pytest
from detectron2 import modeling
from detectron2.config import LazyConfig
from forks import run_forked
from test_docs import blocks
from tiny import ROOT, read_metrics

from d2_memfit import Job
from d2_memfit.cli.command_line import main
from d2_memfit.techniques.registry import TECHNIQUES

PROJECT = ROOT / "projects" / "ViTDet"
FPN = PROJECT / "configs" / "mask_rcnn_fpn_coins.py"
VITDET = PROJECT / "configs" / "mask_rcnn_vitdet_coins.py"
NEEDS_VIT = pytest.mark.skipif(
    not hasattr(modeling, "ViT") or importlib.util.find_spec("timm") is None,
    reason="ViT is in Detectron2 main, and needs timm",
)
SHORT = [
    *("train.max_iter=2", "train.accumulation_steps=2", "train.eval_period=0"),
    *("train.log_period=1", "train.output_dir=output", "train.device=cpu"),
    *("dataloader.train.num_workers=0", "dataloader.test.num_workers=0"),
]


@pytest.fixture(autouse=True)
def folder(coins, tmp_path, monkeypatch):
    """The current folder, with the dataset where the configs look for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output" / "coins").mkdir(parents=True)
    (tmp_path / "output" / "coins" / "dataset").symlink_to(coins)
    before = TECHNIQUES[:]
    yield tmp_path
    TECHNIQUES[:] = before  # without that of the project


@pytest.mark.parametrize(
    "config", [pytest.param(FPN, marks=pytest.mark.slow), pytest.param(VITDET, marks=NEEDS_VIT)]
)
def test_it_trains_with_checkpointing_and_is_evaluated(config, folder, log):
    main(["train", "--config-file", str(config), *SHORT])
    assert "Technique ActivationCheckpointing (exact) is on" in log.text
    metrics = read_metrics(folder / "output")
    assert [m["effective_batch"] for m in metrics if "effective_batch" in m] == [4, 4]
    assert any("segm/AP" in m for m in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("config", [FPN, pytest.param(VITDET, marks=NEEDS_VIT)])
def test_the_command_plans_the_config_as_it_stands(config, folder, capsys):
    planned = folder / "planned.py"
    command = ["plan", "--config-file", str(config), "--device", "cuda", "--output", str(planned)]
    main([*command, "--budget", "1.5", *SHORT, "train.amp.enabled=True"])
    assert "Assumed" not in capsys.readouterr().out  # of the dataset, which is there
    job = Job.from_lazy(LazyConfig.load(str(planned)))
    assert (job.budget_gb, job.cfg.MEMFIT.OOM.POLICY) == (1.5, "split")
    assert job.cfg.SOLVER.AMP.ENABLED
    assert type(job.training_batch(1)[0]["instances"].gt_masks).__name__ == "PolygonMasks"


# There is one where Detectron2 was installed in place.
SCRIPT = Path(detectron2.__file__).resolve().parents[1] / "tools" / "lazyconfig_train_net.py"


def patched(text, diff):
    """A text after a diff, whose hunks lines with @@ separate."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-"
        )
        assert before == after or text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.skipif(not SCRIPT.is_file(), reason="Detectron2's tools are not installed")
def test_the_diff_makes_detectron2_s_own_script_accumulate(folder):
    (diff,) = blocks(PROJECT / "README.md", "diff")
    script = folder / "train_net.py"
    script.write_text(patched(SCRIPT.read_text(), diff))
    opts = [*SHORT, "+dataloader.evaluator.use_fast_impl=False"]
    result = run_forked(script, "--config-file", FPN, *opts)
    assert result.returncode == 0, result.stderr[-4000:]
    metrics = read_metrics(folder / "output")
    effective = [m["effective_batch"] for m in metrics if "effective_batch" in m]
    assert effective == [4, 4]
