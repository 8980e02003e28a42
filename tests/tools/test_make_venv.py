# Copyright (c) the d2_memfit developers.
"""The parts of the set-up that need no network; `make test` runs the rest."""

import re
import sys

import make_venv
from tiny import ROOT


def test_an_environment_of_the_users_own_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["make_venv.py", str(tmp_path)])
    make_venv.main()
    assert [f.name for f in tmp_path.rglob("*")] == ["bin", "python"]


def test_another_pytorch_takes_the_place_of_the_pinned_one():
    pinned = make_venv.requirements_for(None).splitlines()
    assert pinned == make_venv.REQUIREMENTS.read_text().splitlines()
    other = make_venv.requirements_for("2.6.0").splitlines()
    of_pytorch = [line for line in other if re.match(r"(torch(vision)?|nvidia.*)(==|$)", line)]
    assert of_pytorch == ["torch==2.6.0", "torchvision"]
    assert set(other) - set(pinned) == {"torch==2.6.0", "torchvision"}


def test_every_package_is_pinned():
    files = [ROOT / "requirements" / name for name in ("dev.txt", "docs.txt")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith("#")]
    assert len(packages) > 100
    assert all(re.match(r"[\w.-]+==\d[\w.]*( *;| *#|$)", line) for line in packages)
    assert "--hash=sha256:" in (ROOT / "requirements" / "detectron2.txt").read_text()
