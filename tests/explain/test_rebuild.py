# Copyright (c) the d2_memfit developers.
"""Jobs made again from what a log says."""

import re
import time

import pytest
from made_up_logs import config_text

from d2_memfit.common.errors import ConfigError
from d2_memfit.explain.rebuild import Help, card_of, rebuild
from d2_memfit.explain.records import LoggedRun, Oom
from d2_memfit.explain.verdict import predict_run


def rebuilt(run=None, help=None, **keys):
    return rebuild(run or LoggedRun(config_text=config_text(**keys)), help or Help())


def test_keys_of_other_releases_are_kept_aside():
    keys = {"MODEL__ROI_BOX_HEAD__OF_2030": True, "MODEL__MINE": {"A": 1}, "NEW": [2]}
    job, _, assumed = rebuilt(**keys, INPUT__MIN_SIZE_TRAIN=96)  # early releases had one number
    assert "not have: MODEL.MINE.A, MODEL.ROI_BOX_HEAD.OF_2030, NEW" in assumed[-1]
    assert job.cfg.MODEL.DEVICE == "cuda"
    assert job.cfg.INPUT.MIN_SIZE_TRAIN == (96,)


def test_the_config_of_a_log_runs_nothing(tmp_path):
    evil = f"EVIL: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n"
    assert predict_run(LoggedRun(config_text=config_text() + evil), Help())[0] is None
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("images", [None, 10**9])
def test_batches_that_cannot_be(images):
    with pytest.raises(ConfigError, match="must be a positive integer up to 1000000"):
        rebuilt(SOLVER__IMS_PER_BATCH=images)


def test_printed_augmentations_are_made_again():
    text = "[ResizeShortestEdge(short_edge_length=(48, 64), max_size=80), RandomFlip()]"
    run = LoggedRun(config_text=config_text(), augmentations=text)
    assert max(predict_run(run, Help())[0].estimate.image_size) == 80


@pytest.mark.parametrize(
    "text",
    [
        "[__import__('os').system('touch {file}')]",
        "[T.Resize((64, 64))]",
        "[Augmentation.__init__(1)]",
        "[" + "Resize(" * 3000 + ")" * 3000 + "]",
        "[Resize((float('inf'), 3))]",
    ],
    ids=range(5),
)
def test_what_is_not_an_augmentation_is_not_run(tmp_path, text):
    file = tmp_path / "made"
    text = text.replace("{file}", str(file))
    assumed = rebuilt(LoggedRun(config_text=config_text(), augmentations=text))[2]
    assert "those of the log cannot be made" in assumed[-1]
    assert not file.exists()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"MODEL__META_ARCHITECTURE": "Nope\x1b"}, "the model Nope.x1b is not Detectron2's"),
        ({"MODEL__ROI_HEADS__NAME": "My"}, "No object named 'My' found in 'ROI_HEADS' registry"),
        ({"MODEL__RESNETS__DEPTH": 7}, r"does not run \(KeyError: 7, in [^)]*\)$"),
        ({"INPUT__MIN_SIZE_TRAIN": None}, "INPUT.MIN_SIZE_TRAIN must be|cannot be made again"),
        ({"MODEL__META_ARCHITECTURE": ["a"]}, "its job cannot be made again"),
    ],
    ids=range(5),
)
def test_why_nothing_is_predicted_is_one_line(keys, why):
    start = time.process_time()
    prediction, why_not = predict_run(LoggedRun(config_text=config_text(**keys)), Help())
    assert prediction is None
    assert re.search(why, why_not)
    assert why_not.isprintable()
    assert "--batch" not in why_not
    assert time.process_time() - start < 10


@pytest.mark.parametrize("text", ["a: [" * 5000, "text"])
def test_a_config_that_is_cut(text):
    _, why_not = predict_run(LoggedRun(config_text=text), Help())
    assert why_not.startswith("its job cannot be made again")


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match=r"--config-file made/up\.py"):
        rebuild(LoggedRun(config_file="made/up.py"), Help())
    with pytest.raises(ConfigError, match="the log has no config"):
        rebuild(LoggedRun(), Help())


@pytest.mark.parametrize(
    ("name", "total", "card"),
    [
        ("NVIDIA GeForce RTX 3060", None, ("rtx_3060", 12)),
        ("NVIDIA GeForce RTX 3060", 7.6 * 1024, ("rtx_3060_8gb", 8)),
        ("A100-SXM4-40GB", 39.59 * 1024, ("a100", 40)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, (None, 5)),
        ("Made Up", None, (None, None)),
    ],
)
def test_cards(name, total, card):
    run = LoggedRun(gpus=[name], oom=total and Oom("at once", total_mib=total))
    found, gigabytes = card_of(run)
    assert (found and found.device, gigabytes) == card
