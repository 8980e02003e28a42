# Copyright (c) the d2_memfit developers.
"""What a training shows on a screen, in a terminal too, and what its files have."""

import argparse
import fcntl
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from select import select

import pytest
from forks import Forked, run_forked
from tiny import ROOT

from d2_memfit.cli.plan import give_answer
from d2_memfit.cli.screen import escape, say, show

SHORT = [
    *("MODEL.WEIGHTS", "", "MODEL.DEVICE", "cpu", "MODEL.ROI_BOX_HEAD.FC_DIM", "64"),
    *("MODEL.ANCHOR_GENERATOR.SIZES", "[[8], [16], [32], [64], [128]]"),
    *("INPUT.MIN_SIZE_TRAIN", "(32,)", "INPUT.MAX_SIZE_TRAIN", "48", "INPUT.MIN_SIZE_TEST", "32"),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", "50", "MODEL.RPN.POST_NMS_TOPK_TEST", "20"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "16"),
    *("DATALOADER.NUM_WORKERS", "0", "SOLVER.IMS_PER_BATCH", "1", "SEED", "1"),
    *("SOLVER.BASE_LR", "0.0001", "SOLVER.MAX_ITER", "22"),
]


@pytest.fixture(scope="module")
def runs(coins, tmp_path_factory):
    """A folder, and what the command shows: in a terminal, and into a pipe when it is resumed."""
    folder = tmp_path_factory.mktemp("screen")
    command = ["-m", "d2_memfit", "train", "--resume"]
    command += ["--config-file", "COCO-Detection/faster_rcnn_R_50_FPN_3x"]
    for split in ("train", "val"):
        command += ["--coco", f"screen_{split}", coins / f"{split}.json", coins / split]
    started = {"cwd": folder, "env": {"OMP_NUM_THREADS": "1"}}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))  # rows, columns
    process = Forked([*command, *SHORT], os.ttyname(theirs), **started)
    while process.poll() is None and not select([ours], [], [], 0.1)[0]:
        pass  # until it has opened the terminal
    os.close(theirs)
    terminal = b""
    while chunk := read(ours):
        terminal += chunk
    os.close(ours)
    assert process.wait(60) == 0, terminal.decode()
    longer = [*SHORT[:-1], "24"]
    piped = run_forked(*command, *longer, **started)
    assert piped.returncode == 0, piped.stderr
    return folder / "output", terminal.decode(), piped.stdout


def read(descriptor):
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # as Linux says the end of a terminal
        return b""


@pytest.mark.slow
def test_it_shows_no_dumps(runs):
    folder, *shown = runs
    log = (folder / "log.txt").read_text()
    for dump in ("MIN_SIZE_TRAIN:", "Conv2d(", "Environment info", "Namespace("):
        assert dump in log
        assert not any(dump in screen for screen in shown)


@pytest.mark.slow
def test_a_terminal_has_colours_and_files_have_none(runs):
    folder, terminal, piped = runs
    assert "\x1b[32m" in terminal
    assert "\x1b" not in piped
    assert "\x1b" not in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_its_last_line_is_a_command_for_what_it_made(prose, runs, coins):
    folder, _, piped = runs
    prose(piped[piped.index("Written: ") :], coins=coins, folder=folder)


# A name that colours a terminal, sets its title, begins a line, turns text round, and is not UTF-8.
EVIL = "a\x1b[31m\x1b]0;t\x07\r\n[ERROR] \u202eb\x9b2J\udcff"
ESCAPED = r"a\x1b[31m\x1b]0;t\x07\r\n[ERROR] \u202eb\x9b2J\udcff"


def test_what_is_printed_commands_no_terminal(capsys):
    say(f"line {EVIL}")
    show(f"one {EVIL}\ntwo \u00e9")
    printed = capsys.readouterr()
    assert printed.err == f"line {ESCAPED}\n"
    assert printed.out == f"one {ESCAPED}\ntwo \u00e9\n".replace(r"\r\n", "\\r\n")


def test_what_is_logged_commands_no_terminal_and_keeps_its_table():
    formatter = logging.Formatter("\x1b[32mlog\x1b[0m %(message)s")
    text = "table:\n\x1b[36m| a\tb |\x1b[0m %s"
    record = logging.LogRecord("d2_memfit", logging.INFO, "", 0, text, (EVIL,), None)
    expected = ESCAPED.replace(r"\x1b[31m", "").replace(r"\r\n", "\\r\n")
    for _ in range(2):  # for two handlers
        assert escape(record)
        assert formatter.format(record) == f"\x1b[32mlog\x1b[0m table:\n| a\tb | {expected}"
    try:
        raise ValueError(EVIL)
    except ValueError as e:
        record.exc_info = type(e), e, e.__traceback__
    assert escape(record)
    assert r"ValueError: a\x1b[31m" in formatter.format(record)


def test_a_training_with_hostile_names_is_one_like_others(coins, tmp_path):
    coco = json.loads((coins / "train.json").read_text())
    coco["categories"][0]["name"] = EVIL + "$x_{" + "y" * 10_000
    for image in coco["images"][:2]:
        name = EVIL.replace("\u202e", "") + image["file_name"]
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / name).symlink_to(coins / "train" / image["file_name"])
        image["file_name"] = name
    coco["images"] = coco["images"][:2]
    ids = {image["id"] for image in coco["images"]}
    coco["annotations"] = [a for a in coco["annotations"] if a["image_id"] in ids]
    (tmp_path / "evil.json").write_text(json.dumps(coco))
    command = [
        "-m",
        "d2_memfit",
        "train",
        "--config-file",
        "COCO-Detection/faster_rcnn_R_50_FPN_3x",
    ]
    command += ["--coco", "evil", tmp_path / "evil.json", tmp_path / "images"]
    options = [*SHORT[:-1], "1", "OUTPUT_DIR", tmp_path / "output"]
    run = run_forked(*command, *options, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    log = (tmp_path / "output" / "log.txt").read_text()
    for text in (run.stdout, run.stderr, log):
        assert "Traceback" not in text
        assert not set(text) & set("\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("is_terminal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_progress_is_one_line_of_a_terminal_that_goes_away(is_terminal):
    code = (
        "from d2_memfit.cli.screen import show, show_progress as say; "
        "say('first ' + 300 * 'x'); say('second'); "
        "show('Fits: 4.9 of 5.5 GB')"
    )
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:  # of 24 rows with 80 columns
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=env, check=True)
    os.close(theirs)
    shown = read(ours).decode()
    os.close(ours)
    assert run.stdout == b"Fits: 4.9 of 5.5 GB\n"
    if is_terminal:
        assert " first xxx" in shown
        assert "\n" not in shown
        assert not shown.rstrip("\r").rpartition("\r")[2].strip()
    else:
        assert shown == ""


@pytest.mark.parametrize(
    ("html", "details", "last"),
    [
        ({"html": None}, False, "answer\nMore: --details, --json, --html FILE\n\nNext\n"),
        ({}, False, "answer\nMore: --details\n\nNext\n"),
        ({"html": None}, True, "answer\n\nall\n\nNext\n"),
    ],
)
def test_the_answer_comes_first_and_the_next_command_last(html, details, last, capsys):
    give_answer(
        argparse.Namespace(**html, details=details, notes=[]), None, "answer", "all", "Next"
    )
    assert capsys.readouterr().out == last
