# Copyright (c) the d2_memfit developers.
import hashlib

import pytest
import torch
from detectron2.config import get_cfg as get_detectron2_cfg
from detectron2.projects.point_rend import add_pointrend_config
from detectron2.utils.events import EventStorage
from diffs import diffs_in, of_detectron2, undo_diff
from forks import run_forked
from pasted import paste
from tiny import ROOT, images, read_metrics, tiny_model

from d2_memfit.cli.commands import main
from d2_memfit.config import load_cfg
from d2_memfit.techniques import get_technique

pytestmark = pytest.mark.slow

PROJECT = ROOT / "projects" / "PointRend"
COINS = str(PROJECT / "configs" / "pointrend_coins.yaml")
ONE_GPU = str(PROJECT / "configs" / "pointrend_rcnn_R_50_FPN_1x_coco_1gpu.yaml")
# projects/PointRend/train_net.py of Detectron2 main, commit 02b5c4e2
UPSTREAM_SHA256 = "0892312978d73130b853e3e12e163c9868b06ae7259716e8e4452fa3d1e1a4a2"
ADD_KEYS = ["--project", "detectron2.projects.point_rend:add_pointrend_config"]


def test_the_readme_shows_what_was_changed_in_the_script():
    (diff,) = diffs_in(PROJECT / "README.md")
    upstream = undo_diff(diff, (PROJECT / "train_net.py").read_text())
    assert hashlib.sha256(upstream.encode()).hexdigest() == UPSTREAM_SHA256


@pytest.mark.parametrize("page", ["README.md", "docs/YOUR_PROJECT.md"])
def test_other_pages_have_the_lines_that_matter(page):
    of_project = diffs_in(PROJECT / "README.md")[0].splitlines()
    of_page = next(d for d in diffs_in(ROOT / page) if "MemfitTrainer" in d)
    assert set(of_page.splitlines()) <= set(of_project)


@pytest.mark.skipif(
    of_detectron2("projects/PointRend/train_net.py") is None,
    reason="Detectron2 was not installed in place, so its projects' configs are not there",
)
def test_the_recipe_is_that_of_detectron2():
    upstream = get_detectron2_cfg()
    add_pointrend_config(upstream)
    folder = of_detectron2("projects/PointRend/train_net.py").parent / "configs"
    upstream.merge_from_file(
        str(folder / "InstanceSegmentation" / "pointrend_rcnn_R_50_FPN_1x_coco.yaml")
    )
    ours = load_cfg(ONE_GPU, (), [add_pointrend_config])
    assert ours.SOLVER.IMS_PER_BATCH * ours.SOLVER.ACCUMULATION_STEPS == 16
    ours.SOLVER.IMS_PER_BATCH = 16
    del ours["MEMFIT"], ours.SOLVER["ACCUMULATION_STEPS"]
    assert ours == upstream


@pytest.mark.long
def test_it_trains_and_is_evaluated_under_a_budget_that_was_planned_for(tmp_path):
    script = [PROJECT / "coins.py", "--output-dir", tmp_path]
    size = ["INPUT.MIN_SIZE_TRAIN", "(96,)", "INPUT.MIN_SIZE_TEST", "96"]
    length = ["SOLVER.MAX_ITER", "2", "SOLVER.ACCUMULATION_STEPS", "2", "TEST.EVAL_PERIOD", "0"]
    result = run_forked(*script, *size, *length)
    assert result.returncode == 0, result.stderr[-4000:]
    assert (tmp_path / "memfit_plan.yaml").exists()
    metrics = read_metrics(tmp_path)
    assert [m["effective_batch"] for m in metrics if "effective_batch" in m] == [4]
    assert all(m["loss_mask_point"] > 0 for m in metrics if "loss_mask_point" in m)
    assert any("segm/AP" in m for m in metrics)
    paste(result.stdout, tmp_path, FOLDER=tmp_path / "dataset" / "val")


def test_the_command_plans_with_the_project_s_keys(tmp_path, capsys):
    plan_file = tmp_path / "plan.yaml"
    opts = ["--device", "cuda", "--budget", "1.5", "--output", str(plan_file)]
    main(["plan", *ADD_KEYS, "--config-file", COINS, *opts])
    assert " of 1.5 GB" in capsys.readouterr().out.splitlines()[0]
    planned = load_cfg(str(plan_file), (), [add_pointrend_config])
    assert planned.MODEL.ROI_MASK_HEAD.NAME == "PointRendMaskHead"
    assert planned.MEMFIT.BUDGET_GB == 1.5


def test_shared_bit_masks_give_the_same_losses():
    cfg = load_cfg(COINS, (), [add_pointrend_config])
    losses = []
    for is_on in (False, True):
        model = tiny_model(cfg)
        if is_on:
            get_technique("SharedBitMaskTargets").apply(model, cfg)
        torch.manual_seed(0)
        with EventStorage():
            losses.append(model(images(2)))
    assert losses[0] == losses[1]
