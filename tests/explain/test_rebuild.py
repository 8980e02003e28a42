# Copyright (c) the d2_memfit developers.
"""Jobs made again from what a log says."""

import re
import time

import pytest
from made_up_logs import config_text

from d2_memfit.errors import ConfigError
from d2_memfit.explain.rebuild import Help, card_of, rebuild
from d2_memfit.explain.records import LoggedRun, OomText, Progress
from d2_memfit.explain.verdict import Predictions


def rebuilt(run=None, help=None, **keys):
    return rebuild(run or LoggedRun(config_text=config_text(**keys)), help or Help())


def test_keys_of_other_releases_are_kept_aside():
    made = rebuilt(MODEL__ROI_BOX_HEAD__OF_2030=True, MODEL__MINE={"A": 1}, NEW=[2])
    assert "not have: MODEL.MINE.A, MODEL.ROI_BOX_HEAD.OF_2030, NEW" in made.assumed[-1]
    assert made.job.cfg.MODEL.DEVICE == "cuda"
    assert made.job.cfg.INPUT.MIN_SIZE_TRAIN == (64,)


@pytest.mark.parametrize("value", [96, "96", "(96,)", [96], (96,)])
def test_types_are_mended(value):
    if isinstance(value, tuple):
        value = list(value)
    cfg = rebuilt(INPUT__MIN_SIZE_TRAIN=value, SOLVER__IMS_PER_BATCH="8").job.cfg
    assert cfg.INPUT.MIN_SIZE_TRAIN == (96,)
    assert cfg.SOLVER.IMS_PER_BATCH == 8


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (None, "must be a positive integer up to 1000000, got None"),
        ("many", "must be a positive integer up to 1000000, got 'many'"),
        (-3, "must be a positive integer up to 1000000, got -3"),
        (10**9, "no GPU has 1000000000 images"),
    ],
)
def test_batches_that_cannot_be(images, text):
    with pytest.raises(ConfigError, match=text):
        rebuilt(SOLVER__IMS_PER_BATCH=images)


def test_a_batch_that_its_ranks_do_not_divide_is_said():
    made = rebuilt(LoggedRun(config_text=config_text(SOLVER__IMS_PER_BATCH=7), ranks=2))
    assert made.job.geometry.largest_micro_batch == 3
    assert "SOLVER.IMS_PER_BATCH 7 does not divide by 2 ranks: 3 each" in made.assumed


@pytest.mark.parametrize("names", [None, "one", [["a"]], [5], [f"d{i}" for i in range(3000)]])
def test_odd_names_of_datasets(names):
    train = rebuilt(DATASETS__TRAIN=names, DATASETS__TEST=None).job.cfg.DATASETS.TRAIN
    assert train
    assert all(isinstance(name, str) for name in train)


def test_printed_augmentations_are_made_again():
    text = "[ResizeShortestEdge(short_edge_length=(48, 64), max_size=80), RandomFlip()]"
    run = LoggedRun(config_text=config_text(), augmentations=text)
    height, width = Predictions(Help())("run 1", run)[0].estimate.image_size
    assert max(height, width) == 80


def test_without_a_longest_side_twice_the_shorter_one_is_assumed():
    run = LoggedRun(config_text=config_text(), augmentations="[ResizeShortestEdge((48, 64))]")
    prediction, told = Predictions(Help())("run 1", run)
    assert max(prediction.estimate.image_size) == 128
    assert any("no image is longer than 128 pixels" in line for line in told.assumed)


@pytest.mark.parametrize(
    "text",
    [
        "[__import__('os').system('touch {file}')]",
        "[Resize(open('{file}', 'w'))]",
        "[(lambda: open('{file}', 'w'))()]",
        "[T.Resize((64, 64))]",
        "[Augmentation.__init__(1)]",
        "[Resize(**dict(shape=(64, 64)))]",
        "[1, 2]",
        "[" * 9000 + "]" * 9000,
        "[" + "Resize(" * 3000 + ")" * 3000 + "]",
        "][",
        "[Resize((float('inf'), 3))]",
        "[ColorTransform('x')]",
    ],
    ids=range(12),
)
def test_what_is_not_an_augmentation_is_not_run(tmp_path, text):
    file = tmp_path / "made"
    text = text.replace("{file}", str(file))
    made = rebuilt(LoggedRun(config_text=config_text(), augmentations=text))
    assert "those of the log cannot be made" in made.assumed[-1]
    assert not file.exists()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"MODEL__META_ARCHITECTURE": "Nope\x1b"}, "the model Nope.x1b is not Detectron2's"),
        ({"MODEL__ROI_HEADS__NAME": "My"}, "My, of ROI_HEADS, is not Detectron2's: its code is"),
        ({"MODEL__BACKBONE__NAME": "mine"}, "mine, of BACKBONE, is not Detectron2's"),
        ({"MODEL__RESNETS__DEPTH": 7}, r"does not run \(KeyError: 7, in [^)]*\)$"),
        ({"MODEL__ROI_HEADS__NUM_CLASSES": -1}, r"does not run \(RuntimeError.*\)$"),
        ({"MODEL__ROI_HEADS__NUM_CLASSES": "x"}, r"does not run \(TypeError.*\)$"),
        ({"INPUT__MIN_SIZE_TRAIN": None}, "INPUT.MIN_SIZE_TRAIN must be|cannot be made again"),
        ({"MODEL__META_ARCHITECTURE": ["a"]}, "its job cannot be made again"),
        ({"SOLVER__REFERENCE_WORLD_SIZE": "x"}, "its job cannot be made again"),
        ({"MODEL__SEM_SEG_HEAD__NUM_CLASSES": None}, "its job cannot be made again"),
    ],
    ids=range(10),
)
def test_why_nothing_is_predicted_is_one_line(keys, why):
    start = time.process_time()
    prediction, told = Predictions(Help())("run 1", LoggedRun(config_text=config_text(**keys)))
    assert prediction is None
    assert re.search(why, told.not_rebuilt)
    assert told.not_rebuilt.isprintable()
    assert "--batch" not in told.not_rebuilt
    assert time.process_time() - start < 10


def test_notes_are_of_one_run_though_equal_jobs_are_predicted_once():
    predict = Predictions(Help())
    doubtful = predict("run 1", LoggedRun(config_text=config_text(), notes=["a doubt"]))
    other = predict("run 2", LoggedRun(config_text=config_text()))
    assert other[0] is doubtful[0]
    assert "a doubt" in doubtful[1].assumed
    assert "a doubt" not in other[1].assumed


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
        ("Tesla P100-PCIE-16GB", None, ("p100", 16)),
        ("A100-SXM4-40GB", 39.59 * 1024, ("a100", 40)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, (None, 5)),
        ("Made Up 24 GB", None, (None, 24)),
        ("Made Up", 10.76 * 1024, (None, 11)),
        ("Made Up", None, (None, None)),
    ],
)
def test_cards(name, total, card):
    run = LoggedRun(gpus=[name], oom=total and OomText("", "at once", total=total))
    found, gigabytes = card_of(run)
    assert (found and found.device, gigabytes) == card


def test_a_peak_tells_the_size_of_a_card_that_comes_with_several():
    small, large = (
        LoggedRun(gpus=["NVIDIA GeForce GTX 1050"], progress=[Progress(1, 0.1, peak)])
        for peak in (1378.0, 2817.0)
    )
    assert card_of(small)[1] == 2
    assert card_of(large)[1] == 3
