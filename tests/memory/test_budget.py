# Copyright (c) the d2_memfit developers.
"""Limits are set in processes of their own; a limit on the test run would be one on all tests."""

import os
import sys

import pytest
import torch
from detectron2.engine.hooks import CallbackHook
from forks import run_forked
from made_up_card import GB, made_up_card
from monitored import cheap_trainer
from tiny import run_process

from d2_memfit.common.errors import ConfigError
from d2_memfit.engine.hooks import EnforceBudget
from d2_memfit.memory import auto_budget_gb, enforce_budget, process_memory


def run_code(code):
    result = run_forked("-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")


@linux
def test_a_budget_on_the_cpu_cannot_be_exceeded():
    out = run_code(
        """
import torch
from d2_memfit.memory import enforce_budget, is_out_of_memory, process_memory
budget_gb = process_memory().data_bytes / 2**30 + 0.5
enforce_budget(budget_gb, "cpu")
half = torch.ones(2**30 // 16)  # 0.25 GB
try:
    torch.ones(2**30 // 8)  # 0.5 GB more
except RuntimeError as e:
    assert is_out_of_memory(e)
    print("refused")
del half
torch.ones(2**30 // 10)  # what was freed can be used again
assert process_memory().data_bytes <= budget_gb * 2**30
print("went on")
"""
    )
    assert out.split() == ["refused", "went", "on"]


# The first calls into each library of a process.
_FIRST_CALLS = {
    "numpy": "np.linalg.lstsq(np.eye(2), np.ones(2), rcond=None); np.eye(300) @ np.eye(300)",
    "openmp": "torch.ones(300_000).add(1)",
    "onednn": "F.conv2d(torch.ones(1, 8, 40, 40), torch.ones(8, 8, 3, 3))",
    "mkl": "torch.ones(300, 300) @ torch.ones(300, 300)",
}


@pytest.mark.slow
@linux
def test_libraries_have_what_they_cannot_do_without_before_there_is_a_limit():
    """Without it OpenBLAS asks for ever, and OpenMP ends the process."""
    code = f"""
import numpy as np, torch
import torch.nn.functional as F
from d2_memfit.memory import enforce_budget, process_memory
enforce_budget(process_memory().data_bytes / 2**30 + 0.2, "cpu")
blocks = []
try:
    while True:
        blocks.append(bytearray(2**20))
except MemoryError:
    del blocks[-5:]  # less than the stack of a thread
for library, call in {_FIRST_CALLS}.items():
    exec(call)
    print(library, flush=True)
"""
    # A fresh interpreter: what a fork's parent has multiplied would have its buffer.
    command = [sys.executable, "-W", "ignore", "-c", code]
    threads = {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = run_process(command, timeout_s=120, env={**os.environ, **threads})
    assert (result.stdout.split(), result.stderr) == ([*_FIRST_CALLS], "")


@linux
def test_a_budget_can_be_changed_refused_and_taken_back():
    out = run_code(
        """
import os, resource
from d2_memfit.common.errors import ConfigError
from d2_memfit.memory import auto_budget_gb, enforce_budget
soft = lambda: resource.getrlimit(resource.RLIMIT_DATA)[0]
before = soft()
for budget_gb in (13, 16, 0.01, 13):
    try:
        enforce_budget(budget_gb, "cpu")
    except ConfigError as e:
        print(str(e).partition(" is not more than ")[0].split()[-1])
    print(soft() / 2**30)
enforce_budget(None, "cpu")
assert soft() == before
resource.setrlimit(resource.RLIMIT_DATA, (9 * 2**30, 10 * 2**30))
del os.environ["LRU_CACHE_CAPACITY"]
enforce_budget(None, "cpu")  # what somebody else has set stays, and libraries keep less
print(soft() / 2**30, "LRU_CACHE_CAPACITY" in os.environ)
resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 10 * 2**30))
print(auto_budget_gb("cpu"))
enforce_budget(18, "cpu")  # the system allows no more than 10
print(soft() / 2**30)
"""
    )
    assert out.split() == ["13.0", "16.0", "0.01", "16.0", "13.0", "9.0", "True", "2.0", "10.0"]


@linux
def test_auto_is_the_ram_that_is_available_shared_by_ranks():
    alone = auto_budget_gb("cpu")
    taken = process_memory().data_bytes / 2**30
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    assert alone < taken + 1000
    assert alone > taken + available / 2 - 1  # caches can be given back, so it is more
    assert auto_budget_gb("cpu", ranks_here=2) == pytest.approx((alone + taken) / 2, rel=0.1)
    less = auto_budget_gb("cpu", host_bytes=2**30)
    assert less == pytest.approx(alone - 1, rel=0.1)
    with pytest.raises(ConfigError, match="auto: nothing is free on the device cpu"):
        auto_budget_gb("cpu", host_bytes=2**50)


def test_on_a_gpu_the_allocator_gets_what_context_and_kernels_leave(log):
    with made_up_card(total_gb=5.79, outside_gb=0.4) as card:
        enforce_budget(5, "cuda")
        assert card.share * 5.79 == pytest.approx(4.6)
        assert "PyTorch's allocator may take 4.60 GB of the GPU" in log.text
        for wrong in (6, 0.3):
            with pytest.raises(ConfigError, match=rf"{wrong} is more than the 5.79 GB of .*--card"):
                enforce_budget(wrong, "cuda")
            assert card.share * 5.79 == pytest.approx(4.6)
        trainer, limits = cheap_trainer(), []

        def step(_):
            limits.append(round(card.share * 5.79, 2))
            card.outside_bytes += GB // 10

        trainer.register_hooks([CallbackHook(after_step=step), EnforceBudget(5, "cuda")])
        trainer.train(0, 3)  # kernels are loaded
        assert limits == [4.6, 4.5, 4.4]
        assert not trainer.model._forward_hooks
        enforce_budget(None, "cuda")
        assert card.share == 1


def test_on_a_gpu_that_others_use_their_memory_is_not_taken_for_the_context(log):
    with made_up_card(total_gb=11, outside_gb=4.4) as card:
        enforce_budget(8, "cuda")
        assert card.share * 11 == pytest.approx(8 - 1)
        assert "BUDGET_GB 8: others leave 7.60 GB of the GPU" in log.text
        card.outside_bytes += 2 * GB  # another job begins, and its memory is not the context
        enforce_budget(8, "cuda")
        assert card.share * 11 == pytest.approx(8 - 1)
        enforce_budget(None, "cuda")


def test_auto_on_a_gpu_is_what_is_free_less_a_margin():
    with made_up_card(total_gb=5.79, outside_gb=0.7) as card:
        budget_gb = auto_budget_gb("cuda")
        assert budget_gb == pytest.approx(5.79 - 0.25)
        enforce_budget(budget_gb, "cuda")
        assert card.share * card.total_bytes < torch.cuda.mem_get_info()[0]
        card.reserved_bytes = 2 * GB  # measured again in the middle of a run it is the same
        assert auto_budget_gb("cuda") == pytest.approx(budget_gb)
        enforce_budget(None, "cuda")
        card.reserved_bytes, card.outside_bytes = 0, int(5.7 * GB)
        with pytest.raises(ConfigError, match="auto: nothing is free on the device cuda"):
            auto_budget_gb("cuda")
