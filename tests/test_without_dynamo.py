# Copyright (c) the d2_memfit developers.
"""The command starts fast: what it imports, and that PyTorch's compiler is there when asked for."""

import sys

import pytest
from tiny import ROOT, run_process

from d2_memfit.command_line import COMMANDS

pytestmark = pytest.mark.slow

STAND_IN = """
import sys
from d2_memfit.without_dynamo import without_dynamo
with without_dynamo():
    import torch, torchvision
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.1)
    torch.utils.checkpoint.checkpoint(torch.exp, weight, use_reentrant=False).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    from torch._dynamo import is_compiling  # as convolutions of Detectron2's main branch ask
    assert not is_compiling()
    assert "torch._dynamo.convert_frame" not in sys.modules, "imported"
    {code}
import torch._dynamo
assert torch._dynamo.__file__ and torch._dynamo.utils.counters is not None
"""


def run_python(code):
    result = run_process(
        [sys.executable, "-W", "ignore", "-c", code], env={"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_imports_no_pytorch():
    command = [sys.executable, "-X", "importtime", "-m", "d2_memfit", "--help"]
    result = run_process(command, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert "torch" not in result.stderr
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "import torch._dynamo.config as c; assert c is torch._dynamo.config and c.__spec__",
        "torch._dynamo.config.suppress_errors = True; assert torch._dynamo.config.suppress_errors",
        "from torch._dynamo.eval_frame import OptimizedModule",
        "assert torch.compile(torch.neg, backend='eager')(torch.ones(1)) == -1",
    ],
)
def test_the_compiler_is_imported_when_it_is_used(code):
    run_python(STAND_IN.format(code=code))


def test_the_compiler_can_be_imported_in_a_dry_run():
    run_python(
        """
from d2_memfit.without_dynamo import without_dynamo
with without_dynamo():
    from d2_memfit.planner.cuda_as_cpu import cuda_as_cpu
    with cuda_as_cpu():  # as transformers does, when it builds a model
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
"""
    )
