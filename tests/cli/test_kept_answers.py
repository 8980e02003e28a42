# Copyright (c) the d2_memfit developers.
"""Answers that are shown again, in processes of their own."""

import argparse
import json
import os
import sqlite3
import sys

import pytest
from tiny import ROOT, run_process, tiny_cfg

from d2_memfit.cli import kept_answers
from d2_memfit.cli.kept_answers import Reads, keep_answer, keep_dry_runs, known_answer
from d2_memfit.config import load_cfg

WITHOUT_PYTORCH = """
import sys
from d2_memfit.__main__ import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""

COUNTED = """
import sys
from d2_memfit.__main__ import main
from d2_memfit.planner.estimates import steps
made = []
def counted(step):
    def step_noted(*args):
        made.append(step.__name__)
        return step(*args)
    step_noted.__name__ = step.__name__
    return step_noted
steps.train, steps.evaluate = counted(steps.train), counted(steps.evaluate)
try:
    main()
finally:
    print(len(made), file=sys.stderr)
"""


@pytest.fixture
def ask(tmp_path):
    """Runs a command about a tiny job in a folder, and returns its text and whether it knew it."""
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.DATASETS.TEST, cfg.SOLVER.IMS_PER_BATCH = (), 4
    (tmp_path / "tiny.yaml").write_text(cfg.dump())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["D2_MEMFIT_CACHE"] = str(tmp_path / "cache")

    def ask(*command, script=WITHOUT_PYTORCH, **more):
        command = [*command[:1], "--config-file", "tiny.yaml", "--device", "cuda", *command[1:]]
        env = {**environment, **more}
        run = run_process([sys.executable, "-c", script, *command], cwd=tmp_path, env=env)
        assert run.returncode in (0, 3), run.stderr
        if script == COUNTED:
            return run.stdout, run.stderr.splitlines()[-1]
        knew = "nothing has changed since" in run.stderr
        assert (run.stderr.splitlines()[-1] == "False") == (knew and "--output" not in command)
        return run.stdout, knew

    return ask


@pytest.mark.slow
@pytest.mark.long
def test_the_same_question_is_answered_without_pytorch_until_something_changes(ask, tmp_path):
    plan = ("plan", "--card", "6GB")
    first, knew = ask(*plan)
    assert not knew
    assert ask(*plan) == (first, True)
    as_json, knew = ask(*plan, "--json")
    assert knew
    assert json.loads(as_json)["fits"]
    assert ask("plan", "--card", "8GB")[1] is False
    assert ask(*plan, DETECTRON2_DATASETS=str(tmp_path))[1] is False
    assert ask(*plan, "--no-cache") == (first, False)
    (tmp_path / "other_file.txt").write_text("what no job reads")
    assert ask(*plan)[1] is True
    os.utime(tmp_path / "tiny.yaml", (1, 1))
    assert ask(*plan) == (first, False)
    assert ask(*plan) == (first, True)
    # The folder of a dataset that was not there.
    (tmp_path / "datasets" / "coco" / "annotations").mkdir(parents=True)
    assert ask(*plan) == (first, False)


@pytest.mark.slow
@pytest.mark.long
def test_a_plan_that_is_known_is_written_as_it_would_be(ask, tmp_path):
    ask("plan", "--card", "6GB")
    text, knew = ask("plan", "--card", "6GB", "--output", "my plan.yaml")
    assert knew
    assert text.splitlines()[-3:-1] == ["Written: my plan.yaml", "Next, train it:"]
    assert "--config-file 'my plan.yaml'" in text.splitlines()[-1]
    assert ask("plan", "--card", "6GB")[1] is True  # files that it has written are not read
    planned = load_cfg(str(tmp_path / "my plan.yaml"))
    assert planned.MEMFIT.BUDGET_GB == 5.5
    ask("plan", "--card", "6GB", "--output", "other.yaml", "--no-cache")
    assert load_cfg(str(tmp_path / "other.yaml")) == planned
    assert not ask("plan", "--card", "8GB", "--output", "other.yaml")[1]
    assert ask("plan", "--card", "8GB", "--output", "other.yaml")[1]
    assert ask("plan", "--card", "8GB")[1]
    (tmp_path / "taken.yaml").write_text("mine")
    command = [sys.executable, "-m", "d2_memfit", "plan", "--config-file", "tiny.yaml"]
    command += ["--device", "cuda", "--card", "6GB", "--output", "taken.yaml"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "D2_MEMFIT_CACHE": str(tmp_path / "cache"),
    }
    refused = run_process(command, cwd=tmp_path, env=environment)
    assert refused.returncode == 2
    assert "d2_memfit did not write it" in refused.stderr
    assert (tmp_path / "taken.yaml").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.long
def test_another_question_about_a_job_takes_its_dry_runs_until_something_changes(ask, tmp_path):
    def made(*command, **more):
        """What a command prints, and the number of dry runs that it makes."""
        text, last = ask(*command, script=COUNTED, **more)
        return text, int(last)

    in_first = made("plan", "--card", "6GB")[1]
    assert in_first > 0
    second, in_second = made("plan", "--card", "8GB")
    assert in_second == 0  # it fits there too
    assert made("plan", "--card", "8GB", "--no-cache") == (second, in_first)
    assert made("estimate")[1] == 0
    (kept,) = (tmp_path / "cache" / "dry_runs").iterdir()
    os.utime(tmp_path / "tiny.yaml", (1, 1))
    assert made("plan", "--card", "8GB") == (second, in_first)
    assert made("plan", "--card", "4GB", "SOLVER.IMS_PER_BATCH", "2")[1] > 0  # another job
    kept.write_bytes(kept.read_bytes()[:1000])
    assert made("plan", "--card", "10GB")[1] == in_first


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setenv("D2_MEMFIT_CACHE", str(tmp_path / "cache"))
    return argparse.Namespace(
        command="plan", no_cache=False, html=None, output=None, probe=False, budget="6"
    )


ANSWER = {"text": "answer", **dict.fromkeys(("details", "next", "json", "file", "status"))}


def test_files_are_as_they_were_when_they_were_read(args, tmp_path):
    file, missing = tmp_path / "annotations.json", tmp_path / "missing.json"
    file.write_text("1")
    reads = Reads(args)
    file.read_text()
    os.utime(file, (1, 1))  # another process changes it while the command runs
    keep_answer(args, reads, [str(missing)], ANSWER)
    assert known_answer(args) is None
    reads = Reads(args)
    file.read_text()
    keep_answer(args, reads, [str(missing)], ANSWER)
    assert known_answer(args)["text"] == "answer"
    missing.write_text("")
    assert known_answer(args) is None


def test_records_of_runs_and_files_beside_the_cache_count(args, tmp_path):
    """What runs teach is in the same folder."""
    cache = tmp_path / "cache"
    beside = tmp_path / "cache2.txt"
    beside.write_text("1")
    reads = Reads(args)
    os.listdir(cache)
    beside.read_text()
    keep_answer(args, reads, [], ANSWER)
    assert known_answer(args)["text"] == "answer"
    beside.write_text("changed")
    assert known_answer(args) is None
    beside.write_text("1")
    os.utime(beside, ns=(reads.states[str(beside)][0],) * 2)
    assert known_answer(args)["text"] == "answer"
    (cache / "run_1.json").write_text("{}")
    assert known_answer(args) is None


def test_a_file_that_is_opened_for_an_update_is_read_too(args, tmp_path):
    file, written = tmp_path / "weights.bin", tmp_path / "log.txt"
    file.write_bytes(b"1")
    reads = Reads(args)
    with file.open("r+b"), written.open("w"):
        sqlite3.connect(tmp_path / "labels.db").close()
    keep_answer(args, reads, [], ANSWER)
    assert {str(file), str(tmp_path / "labels.db")} <= set(reads.states)
    assert str(written) not in reads.states


def test_an_environment_without_a_venv_has_its_sources_watched(args, tmp_path, monkeypatch):
    """As that of conda, whose site-packages lie in the folder of the standard library."""
    lib = tmp_path / "lib" / "python3.11"
    for package in ("detectron2", "other"):
        (lib / "site-packages" / package).mkdir(parents=True)
        (lib / "site-packages" / package / "a.py").write_text("")
    (lib / "os.py").write_text("")
    reads = Reads(args)
    monkeypatch.setattr(kept_answers, "_STDLIB", f"{lib}/")
    for file in ("site-packages/detectron2/a.py", "site-packages/other/a.py", "os.py"):
        reads.add(lib / file)
    packages = lib / "site-packages"
    assert set(reads.states) == {str(packages / "detectron2" / "a.py"), str(packages)}


def test_a_full_disk_leaves_no_file_behind(args, tmp_path):
    reads = Reads(args)
    reads.dry_runs.parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(TypeError):
        keep_dry_runs(args, reads, {"key": None})
    assert not [*reads.dry_runs.parent.iterdir()]


@pytest.mark.parametrize(("name", "is_same"), [("_", True), ("SSH_TTY", True), ("_SIZE", False)])
def test_variables_of_a_project_are_part_of_the_question(args, monkeypatch, name, is_same):
    before = Reads(args).answer
    monkeypatch.setenv(name, "another")
    assert (Reads(args).answer == before) == is_same


def test_what_is_measured_is_not_kept_and_the_oldest_answers_go(args, tmp_path):
    reads = Reads(args)
    for name in ("probe", "no_cache"):
        keep_answer(argparse.Namespace(**{**vars(args), name: True}), reads, [], {})
    assert not [*(tmp_path / "cache" / "answers").iterdir()]
    left = tmp_path / "cache" / "answers" / "0.123"  # of a command that was killed
    left.write_text("{")
    os.utime(left, (1, 1))
    for i in range(70):
        numbered = argparse.Namespace(**vars(args), i=i)
        keep_answer(numbered, Reads(numbered), [], {**ANSWER, "text": str(i)})
    assert len(list((tmp_path / "cache" / "answers").iterdir())) == 64
    assert not left.exists()
    assert known_answer(argparse.Namespace(**vars(args), i=69))["text"] == "69"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"states": 1}', '{"states": {}}', "[" * 10_000, "\x00"]
)
def test_a_file_that_is_no_answer_is_none(args, tmp_path, text):
    keep_answer(args, Reads(args), [], ANSWER)
    (file,) = (tmp_path / "cache" / "answers").iterdir()
    file.write_text(text)
    assert known_answer(args) is None
