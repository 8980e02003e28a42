# Copyright (c) the d2_memfit developers.
import sys

from tiny import ROOT, run_process, tiny_cfg

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


def test_an_estimate_does_not_import_dynamo_and_what_compiles_still_can(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(tiny_cfg("mask_rcnn").dump())
    code = CODE.replace("{file!r}", repr(str(file)))
    done = run_process([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
