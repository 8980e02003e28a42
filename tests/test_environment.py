# Copyright (c) the d2_memfit developers.
"""The lines that install Detectron2 in an environment."""

import importlib.util
from importlib.metadata import version
from types import SimpleNamespace

from d2_memfit.environment import missing


def test_nothing_is_missing_here():
    assert missing() is None


def test_a_detectron2_before_v0_6_is_told(tmp_path, monkeypatch):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "hooks.py").write_text("class EvalHook: pass")
    assert missing().startswith(f"d2_memfit needs Detectron2 v0.6 or main, and {tmp_path} is older")
    (tmp_path / "engine" / "hooks.py").write_text("class BestCheckpointer: pass")
    assert missing() is None


def test_without_detectron2_the_lines_to_type_are_said(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (name != "detectron2" and find_spec(name)) or None
    )
    assert f"PyTorch {version('torch')}" in missing()
    assert "\n  make venv\n" in missing()
    assert "--no-build-isolation 'git+https://github.com/facebookresearch/detectron2" in missing()
