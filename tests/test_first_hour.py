# Copyright (c) the d2_memfit developers.
"""What README and GETTING_STARTED tell a new user to type, in their order, on photographs of coins.

Images and layers are small and schedules short, which KEY VALUE pairs at the end of the commands
say. With ``-m sweep`` images and layers are those of the recipe.
"""

import json
import os
import resource
import shlex
import shutil

import pytest
from forks import run_forked
from test_docs import blocks
from tiny import ROOT

from d2_memfit.config.load import load_cfg
from d2_memfit.data.hold_out import hold_out

pytestmark = pytest.mark.slow

README, GETTING_STARTED = ROOT / "README.md", ROOT / "docs" / "GETTING_STARTED.md"
CARD_GB = 5.79  # what PyTorch reports for a card that is sold with 6 GB

SHORT = ["SOLVER.MAX_ITER", "1", "DATALOADER.NUM_WORKERS", "0"]
SMALL = [
    *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MAX_SIZE_TRAIN", "96"),
    *("INPUT.MIN_SIZE_TEST", "64", "INPUT.MAX_SIZE_TEST", "96"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "16", "MODEL.RPN.POST_NMS_TOPK_TEST", "20"),
    *("MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64"),
    *("MODEL.ROI_BOX_HEAD.FC_DIM", "64", "SOLVER.IMS_PER_BATCH", "4"),
]


@pytest.fixture
def checkout(coins, tmp_path):
    """A checkout in which a user has put photographs: ``images/`` and ``annotations.json``."""
    for name in ("tools", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "images").mkdir()
    images, annotations = [], []
    for split in ("train", "val"):
        part = json.loads((coins / f"{split}.json").read_text())
        ids = {}
        for image in part["images"]:
            file = f"{split}_{image['file_name']}"
            shutil.copy(coins / split / image["file_name"], tmp_path / "images" / file)
            ids[image["id"]] = len(images)
            images.append({**image, "id": len(images), "file_name": file})
        for annotation in part["annotations"]:
            image_id = ids[annotation["image_id"]]
            annotations.append({**annotation, "id": len(annotations) + 1, "image_id": image_id})
    data = {**part, "images": images, "annotations": annotations}
    (tmp_path / "annotations.json").write_text(json.dumps(data))
    return tmp_path


def type_commands(page, until, folder, opts, limit_gb=None):
    """Run the commands of a page, up to a heading, as a shell would.

    Args:
        opts: KEY VALUE pairs for those that train, plan or estimate.
        limit_gb: of the private memory of each process, which it cannot raise.

    Returns:
        what each has printed.
    """
    lines = "".join(blocks(page, "bash", until=until)).replace("\\\n", " ").splitlines()
    printed = []
    for line in lines:
        program, *arguments = shlex.split(line)
        if program in ("pip", "make"):  # test_import.py and test_coins.py run these
            continue
        assert program in ("python", "d2-memfit")
        if program == "d2-memfit":
            arguments = ["-m", "d2_memfit", *arguments]
        if "predict" not in arguments:
            arguments += opts
        trains = "train_net.py" in line or "d2-memfit train" in line
        if trains and "--eval-only" not in arguments:
            arguments += [*SHORT, "MODEL.WEIGHTS", ""]
        result = run_forked(
            *arguments,
            timeout_s=1500,
            cwd=folder,
            env={"CUDA_VISIBLE_DEVICES": ""},
            limits=[(resource.RLIMIT_DATA, int(limit_gb * 2**30))] if limit_gb else [],
        )
        assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        printed.append(result.stdout + result.stderr)
    return printed


@pytest.mark.parametrize(
    ("limit_gb", "opts"),
    [
        pytest.param(CARD_GB, SMALL, id="a card of 5.79 GB"),
        pytest.param(None, SMALL, id="the CPU", marks=pytest.mark.sweep),
        pytest.param(CARD_GB, [], id="large images", marks=pytest.mark.sweep),
    ],
)
def test_the_commands_of_readme(checkout, limit_gb, opts):
    hold_out([["my", str(checkout / "annotations.json"), "images"]], 0.2, str(checkout), False)
    plan, planned, fit = type_commands(README, "## What you get", checkout, opts, limit_gb)
    assert f"MEMFIT.BUDGET_GB auto on the device cpu: {limit_gb or ''}" in fit
    assert "MODEL.ROI_HEADS.NUM_CLASSES 1: the categories of my_train: coin" in fit
    assert " of 5.5 GB" in plan.splitlines()[0]
    cfg = load_cfg(str(checkout / "plan.yaml"))
    assert cfg.MEMFIT.BUDGET_GB < CARD_GB
    assert "Total inference time" in planned


def test_the_commands_of_getting_started(checkout):
    trained, evaluated, drawn, estimated, planned, _ = type_commands(
        GETTING_STARTED, "## 7.", checkout, SMALL
    )
    output = checkout / "output" / "mine"
    assert (output / "model_final.pth").exists()
    assert "Total inference time" in trained
    assert "Total inference time" in evaluated
    assert "Written: output/mine/inference (results)" in evaluated
    assert "Written: found/pictures, found/coco_instances_results.json, found/images.json" in drawn
    of_val = json.loads((output / "val.json").read_text())["images"]
    in_val = {os.path.basename(image["file_name"]) for image in of_val}
    assert {file.name for file in (checkout / "found" / "pictures").glob("*.png")} == in_val
    assert "The largest micro-batch: " in estimated
    assert " of 5.5 GB" in planned
    assert (checkout / "output" / "on_6GB" / "model_final.pth").exists()
