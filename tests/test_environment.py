# Copyright (c) the d2_memfit developers.
"""The line that installs Detectron2 in an environment."""

import importlib.util
from types import SimpleNamespace

import pytest

from d2_memfit.environment import Environment, _cuda_of, missing

OLD = {"torch": "2.8.0+cu126", "cuda": "12.6"}


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


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({}, "make venv, in a checkout of d2_memfit"),
        ({"is_conda": True, **OLD}, "conda install -c conda-forge detectron2"),
        ({"is_conda": True, "python": (3, 9)}, "make venv"),
        (
            {**OLD, "compiles": True},
            "pip install 'setuptools<82' wheel ninja && pip install --no-b",
        ),
        ({**OLD, "compiles": True, "pip": "uv pip install"}, "uv pip install 'setuptools<82' "),
        (OLD, "pip install --extra-index-url https://miropsota.github.io/torch_packages_builder"),
        ({**OLD, "has_wheels": False}, "make venv"),
        ({"torch": "2.14.1+cu130", "cuda": "13.0"}, "make venv"),  # newer than the wheels
    ],
)
def test_the_line_fits_the_environment(environment, line):
    assert Environment(**environment).line_to_type().startswith(line)


@pytest.mark.parametrize(
    ("torch", "cuda", "end"),
    [
        ("2.8.0+cu126", "12.6", "pt2.8.0cu126"),
        ("2.9.1+cpu", None, "pt2.9.1cpu"),
        ("2.10.0", "12.8", "pt2.10.0cu128"),
    ],
)
def test_a_wheel_is_for_the_release_of_pytorch_and_its_cuda(torch, cuda, end):
    assert f"'detectron2==0.6+VERSION{end}'" in Environment(torch=torch, cuda=cuda).line_to_type()


@pytest.mark.parametrize(
    ("lines", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.6'", "12.6"),
        ("cuda: Optional[str] = None", None),
        ("hip = '6.0'", None),
    ],
)
def test_the_cuda_of_pytorch_is_read_from_its_file(tmp_path, lines, cuda):
    (tmp_path / "version.py").write_text(f"__version__ = '2.8.0'\n{lines}\n")
    assert _cuda_of(str(tmp_path / "__init__.py")) == cuda


def test_this_pytorch_is_described():
    import torch

    here = Environment.here()
    assert here.torch.partition("+")[0] == torch.__version__.partition("+")[0]
    assert here.cuda == torch.version.cuda
    assert f"PyTorch {here.torch} for " in str(here)
