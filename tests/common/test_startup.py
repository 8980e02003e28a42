# Copyright (c) the d2_memfit developers.
"""What is done before PyTorch is imported, and the lines that install Detectron2."""

import importlib.util
import sys
from importlib.metadata import version

import pytest
from tiny import ROOT, run_process, tiny_cfg

from d2_memfit.common.startup import missing

CODE = """
import sys
sys.argv[1:] = ["estimate", "--config-file", {file!r}, "--device", "cuda"]
from d2_memfit.__main__ import main
main()
assert "torch._dynamo.eval_frame" not in sys.modules
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
import torch._dynamo.config
assert "torch._dynamo.eval_frame" in sys.modules
"""


def test_without_detectron2_the_lines_to_type_are_said(monkeypatch):
    assert missing() is None  # all is there
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (name != "detectron2" and find_spec(name)) or None
    )
    assert f"PyTorch {version('torch')}" in missing()
    assert "\n  make venv\n" in missing()
    assert "--no-build-isolation 'git+https://github.com/facebookresearch/detectron2" in missing()


@pytest.mark.slow
def test_an_estimate_does_not_import_dynamo_and_what_compiles_still_can(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(tiny_cfg("mask_rcnn", fpn=False).dump())
    code = CODE.replace("{file!r}", repr(str(file)))
    done = run_process([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
