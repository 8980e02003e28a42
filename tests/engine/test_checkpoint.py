# Copyright (c) the d2_memfit developers.
"""Checkpoints: kills, full disks, damaged and foreign files, earlier runs in the same folder."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.engine import hooks
from forks import run_forked
from saving import resumed, trainer_of
from tiny import ROOT

from d2_memfit.common.errors import CheckpointError
from d2_memfit.common.files import LEFTOVERS, temporary_name
from d2_memfit.engine.checkpoint import MemfitCheckpointer


def saved_run(folder, iterations=3, **kwargs):
    trainer, checkpointer = trainer_of(folder, size=50, **kwargs)
    trainer.train(0, iterations)
    return trainer, checkpointer


def names(folder):
    return sorted(f.name for f in folder.iterdir())


MANY = [pytest.param(*case, marks=pytest.mark.sweep) for case in (("kill", 200), ("full", 50))]


@pytest.mark.parametrize(("kind", "num_runs"), [("kill", 6), ("full", 4), *MANY])
def test_kills_and_full_disks_lose_no_save_that_was_completed(tmp_path, kind, num_runs):
    script = ROOT / "tests" / "saving.py"
    result = run_forked(script, kind, num_runs, 0, tmp_path, timeout_s=600)
    assert result.returncode == 0, result.stderr[-3000:]
    completed, failed = map(int, result.stdout.split()[-2:])
    assert completed > 0
    assert failed > 0 or kind == "kill"


def damage(file, rng):
    """Zero 4 KiB, or one byte, or end the file, somewhere."""
    size = file.stat().st_size
    start, length = rng.randrange(size), rng.choice([1, 4096])
    with file.open("rb+") as f:
        if rng.random() < 0.2:
            f.truncate(start)
            return
        f.seek(start)
        old = f.read(length)
        f.seek(start)
        f.write(bytes(b ^ 255 for b in old) if length == 1 else bytes(len(old)))


def test_a_checkpoint_that_is_damaged_anywhere_is_noticed_and_the_one_before_is_taken(tmp_path):
    (tmp_path / "good").mkdir()
    saved_run(tmp_path / "good")
    rng = random.Random(0)
    taken = []
    for number in range(50):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        damage(folder / "model_0000002.pth", rng)
        _, iteration = resumed(folder, size=50)  # which looks at weights
        taken.append(iteration)
    assert set(taken) <= {1, 2}  # 2 where the bytes that changed are nobody's, such as padding
    assert taken.count(1) >= 40


@pytest.mark.parametrize("content", [None, b"\xff\x00\xfe", b"gone.pth"])
def test_a_lost_or_damaged_last_checkpoint_is_no_fresh_start(tmp_path, content):
    saved_run(tmp_path)
    (tmp_path / "last_checkpoint").unlink()
    if content is not None:
        (tmp_path / "last_checkpoint").write_bytes(content)
    _, iteration = resumed(tmp_path, size=50)
    assert iteration == 2


def test_where_no_checkpoint_is_good_one_error_says_so_and_they_are_kept(tmp_path):
    saved_run(tmp_path)
    for file in tmp_path.glob("*.pth"):
        file.write_bytes(b"not a checkpoint")
    before = names(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"nothing in .* can be resumed: .*; .*; .*\. Without"
    ):
        resumed(tmp_path, size=50)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["model"].clear(), "it has no weight"),
        (lambda c: c["model"].update(weight=torch.ones(3, 50)), r"weight is \(3, 50\) there"),
        (lambda c: [c.pop(k) for k in ("trainer", "iteration")], "no iteration to continue from"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused(tmp_path, change, reason):
    saved_run(tmp_path, iterations=1)
    checkpoint = torch.load(tmp_path / "model_0000000.pth", weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "model_0000000.pth")
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    with pytest.raises(CheckpointError, match=reason):
        checkpointer.resume_or_load("", resume=True)
    assert torch.equal(trainer.model.weight, torch.ones(50, 50))


class FullDisk(MemfitCheckpointer):
    """No file can be written from some iteration on: there is a folder in its place."""

    def save(self, name, **kwargs):
        if kwargs["iteration"] >= 2:
            Path(temporary_name(str(self.folder / f"{name}.pth"))).mkdir(exist_ok=True)
        super().save(name, **kwargs)


@pytest.mark.parametrize("max_to_keep", [1, 2])
def test_a_failed_save_removes_no_older_checkpoint_and_training_goes_on(tmp_path, log, max_to_keep):
    FullDisk.folder = tmp_path
    trainer, _ = saved_run(tmp_path, 5, checkpointer_class=FullDisk, max_to_keep=max_to_keep)
    assert trainer.iter == 5
    expected = ["model_0000000.pth", "model_0000001.pth"][-max_to_keep:]
    assert [n for n in names(tmp_path) if n.endswith(".pth")] == expected
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    file = tmp_path / "model_0000002.pth"
    assert f"cannot save the checkpoint {file} ([Errno 21] Is a directory" in log.text
    assert "Training continues" in log.text


def test_a_last_save_that_fails_is_an_error(tmp_path):
    FullDisk.folder = tmp_path
    _, checkpointer = trainer_of(tmp_path, checkpointer_class=FullDisk)
    with pytest.raises(CheckpointError, match=r"model_final\.pth"):
        checkpointer.save("model_final", iteration=2)


def test_a_trainer_alone_goes_on_with_its_random_numbers_and_counts_an_iteration_once(tmp_path):
    saved_run(tmp_path, 2)
    trainer, _ = resumed(tmp_path, size=50)
    expected, drawn, saved = torch.rand(1), [], []
    begin = hooks.CallbackHook(before_step=lambda _: drawn.append(torch.rand(1)))
    end = hooks.CallbackHook(after_train=lambda t: saved.append(t.state_dict()["iteration"]))
    trainer.register_hooks([begin, end])
    trainer.train(2, 3)
    assert drawn == [expected]
    assert saved == [2]


def test_a_run_that_does_not_resume_moves_the_earlier_ones_checkpoints_aside(tmp_path, log):
    saved_run(tmp_path)
    (tmp_path / f"model_0000009.pth{LEFTOVERS[1:]}").touch()  # of a run that was killed
    (tmp_path / "R-50.pth").touch()
    earlier = (tmp_path / "model_0000002.pth").read_bytes()
    for number in (1, 2):
        trainer, checkpointer = trainer_of(tmp_path, size=50)
        checkpointer.resume_or_load("", resume=False)
        assert (tmp_path / "model_0000002.pth").exists()  # to evaluate changes nothing
        trainer.train(0, 3)
        folder = tmp_path / f"earlier_{number}"
        assert "model_0000002.pth" in names(folder)
        assert (folder / "last_checkpoint").read_text() == "model_0000002.pth"
        assert f"are moved to {folder}" in log.text
    assert (tmp_path / "earlier_1" / "model_0000002.pth").read_bytes() == earlier
    assert "R-50.pth" in names(tmp_path)
    assert not list(tmp_path.glob(LEFTOVERS))
    assert resumed(tmp_path, size=50)[1] == 2
    trainer, _ = resumed(tmp_path, size=50)
    trainer.train(3, 5)
    assert not (tmp_path / "earlier_3").exists()


def load(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.full((3,), float("-inf")))  # as of attention
    MemfitCheckpointer(model).load(str(tmp_path / "w.pth") if content else "")
    return model


class Own(DetectionCheckpointer):
    def _load_model(self, checkpoint):
        checkpoint["model"] = {
            k.removeprefix("student."): v for k, v in checkpoint["model"].items()
        }
        return super()._load_model(checkpoint)


def test_a_checkpointer_of_a_project_s_own_class_stays_as_it_is_and_another_has_its_methods(
    tmp_path,
):
    made = Own(torch.nn.Linear(1, 2), str(tmp_path))
    checkpointer = MemfitCheckpointer.like(made)
    assert type(made) is Own
    checkpointer.save("model_0000000", iteration=0)
    state = torch.load(tmp_path / "model_0000000.pth", weights_only=True)
    state["model"] = {f"student.{name}": value + 1 for name, value in state["model"].items()}
    torch.save(state, tmp_path / "model_0000000.pth")
    before = made.model.weight.clone()
    assert checkpointer.resume_or_load("", resume=True)["iteration"] == 0
    assert torch.equal(made.model.weight, before + 1)


@pytest.mark.parametrize(
    "form",
    [
        lambda s: {"model": {"state_dict": s}},
        lambda s: {"model_state_dict": {f"module.{name}": value for name, value in s.items()}},
        lambda s: s,
    ],
)
def test_weights_of_other_programs_are_taken_and_a_nan_is_named(tmp_path, form):
    expected = load(tmp_path, None).state_dict()
    loaded = load(tmp_path, form(expected)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    for name, value in (("0.bias", "inf"), ("1.running_var", "nan")):
        state = {**expected, name: torch.full_like(expected[name], float(value))}
        with pytest.raises(CheckpointError, match=f"NaN or infinite values in .*{name}"):
            load(tmp_path, form(state))


class Versioned(torch.nn.Linear):
    """It takes weights without a version for older ones, as the head of MaskFormer does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version") != 2:
            del state_dict[f"{prefix}bias"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_versions_of_modules_are_kept(tmp_path):
    saved, loaded = Versioned(2, 2), Versioned(2, 2)
    MemfitCheckpointer(saved, str(tmp_path)).save("model_0000000", iteration=0)
    MemfitCheckpointer(loaded, str(tmp_path)).resume_or_load("", resume=True)
    assert torch.equal(loaded.bias, saved.bias)
