# Copyright (c) the d2_memfit developers.
"""The command explain, as owners of logs use it."""

import html
import json

import pytest
from made_up_logs import OOM, TRACEBACK, config_text, headed, log, notebook, progress
from pasted import paste

import d2_memfit
from d2_memfit.cli.command_line import main
from d2_memfit.config.load import load_cfg

RUN = {
    *("name", "card", "images_per_gpu", "measured_mib", "typical_mib", "predicted_mib"),
    *("range_mib", "inside", "ended", "oom", "seconds", "assumed", "not_rebuilt"),
}
OOM_KEYS = {"case", "iteration", "tried_mib", "total_mib", "free_mib", "allocated_mib"}
OOM_KEYS |= {"reserved_mib", "process_mib", "held_by_others_mib", "fits"}


def messages(*end, **keys):
    """Messages of a run whose model is here."""
    found = log(*end, config=f"Running with full config:\n{config_text(**keys)}")
    return [m for m in found if "Augmentations" not in m]


@pytest.fixture
def write(tmp_path):
    def write(text, name="log.txt"):
        (tmp_path / name).write_text(text if isinstance(text, str) else headed(text))
        return str(tmp_path / name)

    return write


def refused(capsys, *args):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *args])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def not_a_number(constant):
    pytest.fail(f"{constant} is not JSON")


def explained(capsys, *args):
    main(["explain", *args, "--json"])
    return json.loads(capsys.readouterr().out, parse_constant=not_a_number)


def test_json_has_the_names_of_the_contract(write, capsys):
    broken = [m.replace("GeneralizedRCNN", "Nobodys") for m in messages(TRACEBACK + OOM)]
    found = explained(capsys, write([*messages(), *messages(TRACEBACK + OOM), *broken]))
    assert set(found) == {"runs"}
    plain, died, unknown = found["runs"]
    assert all(set(run) == RUN for run in found["runs"])
    assert set(died["oom"]) == OOM_KEYS
    assert plain["oom"] is None
    assert (plain["ended"], died["ended"]) == ("running", "out of memory")
    low, high = plain["range_mib"]
    assert low <= plain["typical_mib"] <= plain["predicted_mib"] <= high
    assert (plain["images_per_gpu"], plain["measured_mib"], plain["inside"]) == (2, 3000, False)
    assert died["oom"]["total_mib"] == 10240
    assert (unknown["predicted_mib"], unknown["range_mib"], unknown["inside"]) == (None,) * 3
    assert unknown["images_per_gpu"] == 2
    assert "Nobodys" in unknown["not_rebuilt"]


def test_python_has_the_same_runs(write):
    (run,) = d2_memfit.explain(write(messages(MODEL__META_ARCHITECTURE="Mine"))).runs
    assert (run.name, run.card, run.ended) == ("run 1", "Made Up GPU 9000", "running")


def test_the_last_run_that_died_is_explained(prose, write, capsys):
    main(["explain", write([*messages(TRACEBACK + OOM), *messages()])])
    prose(capsys.readouterr().out)


@pytest.mark.slow
def test_the_commands_lead_from_a_log_to_a_plan(write, tmp_path, capsys):
    main(["explain", write(messages())])
    text = capsys.readouterr().out
    assert text.startswith("It did not run out of memory")
    text = paste(text, tmp_path)
    assert "\nIt fits 7.5 GB: " in text
    assert "Written: plan.yaml\nNext, train it:\n" in text
    planned = load_cfg(str(tmp_path / "plan.yaml"))
    assert planned.MEMFIT.BUDGET_GB == 7.5
    assert planned.DATASETS.TRAIN == ("of_a_stranger",)
    assert planned.SOLVER.IMS_PER_BATCH == 4


def test_the_next_command_keeps_what_was_told(write, coins, capsys):
    coco = ["--coco", "of_explain", str(coins / "train.json"), str(coins / "train")]
    told = [*coco, "--trainer", "detectron2.engine:DefaultTrainer"]
    told += ["--instances", "3"]
    main(["explain", write(messages()), "--card", "RTX 3060", *told])
    command = capsys.readouterr().out.splitlines()[-1]
    for words in ("--card 'RTX 3060'", "--coco", "--trainer", "--instances 3", "--output"):
        assert words in command


def test_without_code_the_answer_names_what_is_missing(write, capsys):
    main(["explain", write(messages(MODEL__META_ARCHITECTURE="Mine"))])
    assert (
        "name its code, --project MODULE:FUNCTION --trainer MODULE:CLASS" in capsys.readouterr().out
    )
    lazy = [m.replace("up.yaml", "up.py") for m in log() if "full config" not in m]
    main(["explain", write(lazy)])
    assert "name its file, --config-file made/up.py" in capsys.readouterr().out


def test_a_log_without_its_config_is_explained_with_that_file(write, tmp_path, capsys):
    path = write([m for m in messages() if "full config" not in m])
    given = [path, "--config-file", write(config_text(), "own.yaml")]
    (run,) = explained(capsys, *given)["runs"]
    (same,) = explained(capsys, write(messages(), "whole.txt"))["runs"]
    assert run["range_mib"] == same["range_mib"]
    assert f"with the config {given[-1]}, as the log has none" in run["assumed"]
    main(["explain", *given, "--card", "8GB"])
    assert capsys.readouterr().out.endswith("own.yaml --card 8GB --output plan.yaml\n")
    main(["explain", *given, "--card", "8GB", "--output", str(tmp_path / "plan.yaml")])
    assert load_cfg(str(tmp_path / "plan.yaml")).SOLVER.IMS_PER_BATCH == 4


def test_a_plan_that_cannot_be_written_is_not_a_success(write, tmp_path, capsys):
    file = tmp_path / "plan.yaml"
    unknown = messages(MODEL__META_ARCHITECTURE="Mine")
    for log_file in (write(messages()), write(unknown, "other.txt")):  # no card, no model
        with pytest.raises(SystemExit, match="3"):
            main(["explain", log_file, "--output", str(file)])
        assert not file.exists()


def test_a_page_has_the_answer_and_the_step(write, tmp_path, capsys):
    page = tmp_path / "page.html"
    path = write(messages(TRACEBACK + OOM, SOLVER__IMS_PER_BATCH=8))
    main(["explain", path, "--card", "12GB", "--html", str(page)])
    found = html.unescape(page.read_text())
    assert capsys.readouterr().out.splitlines()[0] in found
    assert "BUDGET_GB: 11.5" in found
    assert "<svg" in found
    unknown = write(messages(MODEL__META_ARCHITECTURE="Mine"), "other.txt")
    other = tmp_path / "other.html"
    main(["explain", unknown, "--html", str(other), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["not_rebuilt"]
    assert "<svg" not in other.read_text()


def test_a_run_that_diverged_gets_a_plan_if_it_is_asked_for(write, capsys):
    path = write(messages(TRACEBACK + "FloatingPointError: Loss became infinite or NaN"))
    main(["explain", path])
    text = capsys.readouterr().out
    assert text.startswith("It diverged")
    assert "It fits" not in text
    main(["explain", path, "--card", "8GB"])
    assert "It fits 7.5 GB" in capsys.readouterr().out


def test_an_existing_file_is_not_said_to_be_replaced_when_nothing_is_written(
    write, tmp_path, capsys
):
    plan, path = tmp_path / "plan.yaml", write(messages())
    main(["explain", path, "--card", "8GB", "--output", str(plan)])
    assert "Written: " in capsys.readouterr().out
    before = plan.read_text()
    assert "plan.yaml exists" in refused(capsys, path, "--output", str(plan))
    assert plan.read_text() == before


@pytest.mark.parametrize(
    "option",
    [
        ("--card", "Voodoo 2"),
        ("--project", "nobody:x"),
        ("--trainer", "os:Trainer"),
        ("--config-file", "no.yaml"),
    ],
)
def test_options_that_cannot_be_are_one_line(prose, write, capsys, option):
    prose(refused(capsys, write(messages()), *option))


@pytest.mark.parametrize("text", ["", "a poem"])
def test_what_is_not_a_log_is_one_line(prose, write, capsys, text):
    prose(refused(capsys, write(text)))


def test_a_config_file_that_runs_code_is_not_loaded(write, tmp_path, capsys):
    evil = write(f"MODEL: !!python/object/apply:os.mkdir ['{tmp_path}/made']\n", "evil.yaml")
    code = f"cfg = get_cfg()\ncfg.merge_from_file({evil!r})"
    trained = headed(["Starting training from iteration 0", progress(19)])
    main(["explain", write(notebook((code, ""), ("", trained)), "a.ipynb")])
    assert "Not predicted" in capsys.readouterr().out
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_a_lazy_config_is_named_by_its_file(write, tmp_path, capsys):
    lazy = write([m.replace("up.yaml", "up.py") for m in log() if "full config" not in m])
    file = tmp_path / "own.py"
    lines = ["from lazy_configs import lazy_config", "globals().update(lazy_config())"]
    file.write_text("\n".join(lines))
    peaks = []
    for size in ("64,64", "64,96"):
        main(["explain", lazy, "--config-file", str(file), "--image-size", size, "--json"])
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert run["images_per_gpu"] == 2  # of 4 on two ranks
        assert run["not_rebuilt"] == ""
        peaks.append(run["predicted_mib"])
    assert peaks[0] < peaks[1]
    options = ["explain", lazy, "--config-file", str(file), "--card", "8GB"]
    main(options)
    assert capsys.readouterr().out.splitlines()[-1].endswith("--output plan.py")
    plan = tmp_path / "plan.py"
    main([*options, "--output", str(plan)])
    assert "'train.memfit.budget_gb'" in plan.read_text()
    capsys.readouterr()
    error = refused(capsys, lazy, "--config-file", str(file), "--trainer", "tiny:tiny_model")
    assert "--trainer only works with yaml configs" in error
