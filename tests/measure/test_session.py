# Copyright (c) the d2_memfit developers.
import json
import os
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import yaml
from forks import Forked

from d2_memfit.errors import ConfigError
from d2_memfit.measure import session
from d2_memfit.measure.items import items_of
from d2_memfit.measure.results import MACHINE, Results
from d2_memfit.measure.session import measure_gpu

pytestmark = pytest.mark.slow

MACHINE_RECORD = {"stage": "measured", "item": MACHINE, "card": "Some Card", "pytorch": "2.14"}
MACHINE_RECORD |= {"date": "2026-11-24", "rehearsal": False}


@pytest.mark.exhaustive
def test_a_rehearsal_measures_a_little_of_all(tmp_path):
    lines = []
    files = measure_gpu("cpu", 30, tmp_path, lines.append)
    results = Results.read(tmp_path / "measured.jsonl")
    records = [*results.stages["expected"].values(), *results.stages["measured"].values()]
    assert len(lines) == len(records)
    assert not [record for record in records if "error" in record]
    assert results.machine["rehearsal"]
    expected = {key.partition("/")[0] for key in results.stages["expected"]}
    compared = json.loads((tmp_path / f"{files[1].stem}.json").read_text())
    assert compared["expected_over_measured"].keys() == expected
    for group in compared["expected_over_measured"].values():
        assert group["allocated_gb"][0] == pytest.approx(1, abs=0.01)
        assert group.get("evaluation_allocated_gb", [1])[0] == pytest.approx(1, abs=0.05)
    recovery = results.stages["measured"]["recovery/"]
    assert recovery["oom_events"] >= 1
    assert recovery["micro_batch"] < recovery["images"]
    assert {r["ranks"] for r in results.outside if "ranks" in r} == {2, 3}
    assert yaml.safe_load(files[-1].read_text()) == results.device_file()


def interrupted(tmp_path, number, lines):
    """What a rehearsal leaves that gets a signal after so many lines."""
    command = ["-m", "d2_memfit", "measure-gpu", "--device", "cpu", "--output", tmp_path / "out"]
    printed = tmp_path / "printed"
    process, end = Forked(command, printed), time.monotonic() + 240
    log = tmp_path / "out" / "measured.jsonl"
    try:
        while not log.exists() or log.read_text().count("\n") < lines:
            assert process.poll() is None, printed.read_text()
            assert time.monotonic() < end, printed.read_text()
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, number)  # its worker too
    process.wait(60)
    return Results.read(log), sorted(p.suffix for p in (tmp_path / "out").glob("[!.]*"))


@pytest.mark.long
def test_what_is_killed_leaves_what_was_measured(tmp_path):
    results, files = interrupted(tmp_path, signal.SIGKILL, 2)
    assert results.machine["rehearsal"]
    (expected,) = results.stages["expected"].values()
    assert expected["allocated_gb"] > 0
    assert files == [".jsonl"]


@pytest.mark.long
def test_an_interrupt_writes_the_pages(tmp_path):
    _, files = interrupted(tmp_path, signal.SIGINT, 1)
    assert files == [".json", ".jsonl", ".md"]


class Workers:
    """Processes that say what each test makes of their items.

    Args:
        end_of: for an item, the error with which a process ends in it or, as a number, after it.
    """

    def __init__(self, monkeypatch, end_of=()):
        self.end_of = dict(end_of)
        self.todo = []
        self.card = "Some Card"
        self.now = 0.0
        self.num_started = self.num_ended = 0
        monkeypatch.setattr(session, "Worker", self.start)
        monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: self.now))

    def start(self, command, environment):
        self.num_started += 1
        return SimpleNamespace(run=partial(self.run, command[3]), end=self.end)

    def end(self):
        self.num_ended += 1

    def run(self, stage, given, seconds, take):
        self.end()
        keys = json.loads(given)
        self.todo.append((stage, [*keys]))
        for key in keys:
            end = self.end_of.pop((stage, key), None)
            if isinstance(end, str):
                self.now += 60 * 9 * (end == OVER)
                return end
            other = MACHINE_RECORD if key == MACHINE else {}
            other = other | ({"card": self.card} if other else {"allocated_gb": 1.0})
            take({**other, "stage": stage, "item": key})
            if end is not None:
                return f"status {end}"
        return None


OVER = "the time was over"
FIRST = "zoo/COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
SECOND = "zoo/COCO-Detection/faster_rcnn_R_50_FPN_3x"
ESTIMATES = [
    {"stage": "expected", "item": item.key}
    for item in items_of(torch.device("cuda:0"))
    if item.has_estimate
]


def test_an_interrupt_before_the_first_record_leaves_a_file_and_no_process(tmp_path, monkeypatch):
    def interrupt(*_):
        workers.end()
        raise KeyboardInterrupt

    workers = Workers(monkeypatch)
    workers.run = interrupt
    (tmp_path / "measured.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in ESTIMATES))
    with pytest.raises(KeyboardInterrupt):
        measure_gpu("cuda:0", 1, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["measured.jsonl"]
    assert workers.num_ended == workers.num_started > 1


def test_each_item_has_a_process_and_a_record_and_nothing_is_measured_twice(tmp_path, monkeypatch):
    workers = Workers(monkeypatch)
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    keys = [i.key for i in items_of(torch.device("cuda:0"))]
    estimated = [i.key for i in items_of(torch.device("cuda:0")) if i.has_estimate]
    measured = [("measured", [key]) for key in keys]
    # The machine comes first, to see that it answers.
    assert workers.todo == [measured[0], ("expected", estimated), *measured]
    results = Results.read(tmp_path / "measured.jsonl")
    assert [*results.stages["measured"]] == keys
    workers.todo.clear()
    files = measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert workers.todo == measured[:1]
    assert workers.num_ended == workers.num_started
    assert [f.name for f in files] == ["measured.jsonl", "some_card.md", "some_card.json"]


def test_what_tells_most_is_measured_first():
    groups = [*dict.fromkeys(i.group for i in items_of(torch.device("cuda:0")))]
    first = ["machine", "calibration", "outside", "zoo", "plans", "recovery", "trainers", "zoo amp"]
    assert groups[: len(first)] == first
    assert groups[-1] == "fragments"  # before the presets of the second model


def test_estimates_made_beforehand_are_not_waited_for(tmp_path, monkeypatch):
    workers = Workers(monkeypatch)
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None, estimate="h100")
    assert [stage for stage, _ in workers.todo] == ["expected"]
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert {stage for stage, _ in workers.todo[1:]} == {"measured"}


@pytest.mark.parametrize(
    ("stage", "end"),
    [
        ("expected", "status -11: Segmentation fault"),
        ("measured", "status -11: Segmentation fault"),
        ("measured", 9),
    ],
)
def test_a_process_that_dies_takes_no_other_item_with_it(tmp_path, monkeypatch, stage, end):
    workers = Workers(monkeypatch, {(stage, FIRST): end})
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    records = Results.read(tmp_path / "measured.jsonl").stages[stage]
    assert records[FIRST].get("error") == (end if isinstance(end, str) else None)
    assert "error" not in records[SECOND]
    assert workers.num_ended == workers.num_started


def test_an_item_at_which_the_time_is_over_is_measured_in_the_next_part(tmp_path, monkeypatch):
    Workers(monkeypatch, {("measured", SECOND): OVER})
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert SECOND not in Results.read(tmp_path / "measured.jsonl").stages["measured"]
    workers = Workers(monkeypatch)
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert SECOND in Results.read(tmp_path / "measured.jsonl").stages["measured"]
    assert workers.todo[:2] == [("measured", [MACHINE]), ("measured", [SECOND])]


def test_an_item_that_takes_a_whole_part_is_not_tried_again(tmp_path, monkeypatch):
    Workers(monkeypatch, {("measured", SECOND): OVER})
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    Workers(monkeypatch, {("measured", SECOND): OVER})
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert Results.read(tmp_path / "measured.jsonl").stages["measured"][SECOND]["error"] == OVER


def test_a_folder_has_figures_of_one_card(tmp_path, monkeypatch):
    workers = Workers(monkeypatch)
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    workers.card = "Another Card"
    with pytest.raises(ConfigError, match=r"has figures of Some Card with PyTorch 2\.14; name"):
        measure_gpu("cuda:0", 9, tmp_path, lambda line: None)


@pytest.mark.parametrize("name", ["measured.jsonl", "some_card.md", "some_card.yaml"])
def test_a_file_of_the_user_stays(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("mine")
    workers = Workers(monkeypatch)
    with pytest.raises(ConfigError, match=f"{name} exists, but d2_memfit did not write it"):
        measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert [keys for _, keys in workers.todo] in ([], [[MACHINE]])  # which says the card's name
    assert (tmp_path / name).read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} <= {name, "measured.jsonl"}


def test_a_table_that_was_changed_stays_and_the_records_too(tmp_path, monkeypatch):
    Workers(monkeypatch)
    measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    with (tmp_path / "some_card.md").open("a") as file:
        file.write("mine")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    workers = Workers(monkeypatch)
    with pytest.raises(ConfigError, match=r"some_card\.md exists, but d2_memfit did not write it"):
        measure_gpu("cuda:0", 9, tmp_path, lambda line: None)
    assert not workers.todo
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("device", "minutes", "error"),
    [
        ("tpu", 1, "--device must be cuda:0, of another number, or cpu, got 'tpu'"),
        ("cpu", 0, "--minutes must be a positive number, got 0"),
        pytest.param(
            *("cuda:99", 1, "--device cuda:99 cannot be used: status 1: "), marks=pytest.mark.long
        ),
    ],
)
def test_what_cannot_be_measured_is_an_error(device, minutes, error, tmp_path):
    with pytest.raises(ConfigError, match=error):
        measure_gpu(device, minutes, tmp_path)
    assert list(tmp_path.iterdir()) == []
