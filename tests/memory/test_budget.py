# Copyright (c) the d2_memfit developers.
"""Limits are set in processes of their own; a limit on the test run would be one on all tests."""

import math
import os
import re
import sys

import pytest
import torch
from detectron2.engine.hooks import CallbackHook
from forks import run_forked
from monitored import cheap_trainer
from tiny import run_process

from d2_memfit.engine.hooks import EnforceBudget
from d2_memfit.errors import ConfigError
from d2_memfit.memory import (
    auto_budget_gb,
    budget,
    check_budget,
    enforce_budget,
    limit_library_caches,
    process_memory,
)

pytestmark = pytest.mark.slow


def run_code(code):
    result = run_forked("-c", code)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("value", [0, -1, "6 gigs", True, float("nan"), float("inf")])
def test_what_is_no_budget_is_refused(value):
    with pytest.raises(ConfigError, match=r"MEMFIT.BUDGET_GB must be a number of GB above 0"):
        check_budget(value)


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


@linux
def test_the_loaders_workers_have_the_same_budget():
    out = run_code(
        """
import torch
from torch.utils.data import DataLoader
from d2_memfit.engine.window.window import Window
from d2_memfit.errors import HostMemoryError
from d2_memfit.memory import enforce_budget, process_memory

class Hungry:
    def __len__(self): return 4
    def __getitem__(self, i): return torch.ones(2**30 // 4)

enforce_budget(process_memory().data_bytes / 2**30 + 0.5, "cpu")
try:
    Window(iter(DataLoader(Hungry(), num_workers=1)), 1).take()
except HostMemoryError as e:
    print(e)
"""
    )
    assert "the data loader ran out of the host's memory" in out
    assert "can't allocate memory" in out
    assert "Lower DATALOADER.NUM_WORKERS" in out
    assert len(out.splitlines()) == 1


# The first calls into each library of a process.
_FIRST_CALLS = {
    "numpy": "np.linalg.lstsq(np.eye(2), np.ones(2), rcond=None); np.eye(300) @ np.eye(300)",
    "scipy": "scipy.linalg.lstsq(np.eye(2), np.ones(2))",
    "openmp": "torch.ones(300_000).add(1)",
    "onednn": "F.conv2d(torch.ones(1, 8, 40, 40), torch.ones(8, 8, 3, 3))",
    "mkl": "torch.ones(300, 300) @ torch.ones(300, 300)",
    "opencv": "cv2.GaussianBlur(np.ones((600, 600, 3), np.uint8), (5, 5), 1)",
}


@linux
def test_libraries_have_what_they_cannot_do_without_before_there_is_a_limit():
    """Without it OpenBLAS asks for ever, OpenMP ends the process, and OpenCV prints an error."""
    code = f"""
import cv2, numpy as np, scipy.linalg, torch
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
import resource
from d2_memfit.errors import ConfigError
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
resource.setrlimit(resource.RLIMIT_DATA, (9 * 2**30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
enforce_budget(None, "cpu")  # what somebody else has set stays
assert auto_budget_gb("cpu") <= 9
enforce_budget(18, "cpu")
print(soft() / 2**30)
enforce_budget(None, "cpu")
print(soft() / 2**30)
"""
    )
    assert out.split() == ["13.0", "16.0", "0.01", "16.0", "13.0", "9.0", "9.0"]


@linux
def test_onednn_keeps_the_code_of_few_convolutions_under_a_budget():
    code = """
import torch
from d2_memfit.memory import enforce_budget, process_memory
torch.set_num_threads(1)
if {budget}:
    enforce_budget(process_memory().data_bytes / 2**30 + 2, "cpu")
weight = torch.randn(32, 32, 3, 3, requires_grad=True)
before = process_memory().data_bytes
for i in range(100):
    x = torch.randn(1, 32, 20 + i, 30 + i)
    torch.nn.functional.conv2d(x, weight, padding=1).sum().backward()
    weight.grad = None
print((process_memory().data_bytes - before) / 2**20)
"""
    without, within = (float(run_code(code.format(budget=b))) for b in (False, True))
    assert within < without / 2


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


class Card:
    """What PyTorch says of a GPU, and the limit of its allocator. GB of 2^30 bytes."""

    def __init__(self, monkeypatch, total_gb, context_gb, others_gb=0):
        self.total_gb, self.context_gb, self.others_gb = total_gb, context_gb, others_gb
        self.share = 1.0
        self.reserved_gb = 0
        self.gb = 2**30
        fakes = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "mem_get_info": lambda _: (int(self.free_gb * self.gb), int(total_gb * self.gb)),
            "memory_reserved": lambda _: int(self.reserved_gb * self.gb),
            "get_device_name": lambda _: "NVIDIA Test",
            "get_per_process_memory_fraction": lambda _: self.share,
            "set_per_process_memory_fraction": self._limit,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake, raising=False)
        monkeypatch.setattr(budget, "_others", {})  # of another card

    def _limit(self, share, _):
        self.share = math.nextafter(share, 0)  # PyTorch rounds to bytes

    @property
    def free_gb(self):
        return self.total_gb - self.context_gb - self.others_gb - self.reserved_gb

    @property
    def limit_gb(self):
        return self.share * self.total_gb


def test_on_a_gpu_the_allocator_gets_what_context_and_kernels_leave(monkeypatch, log):
    card = Card(monkeypatch, total_gb=5.79, context_gb=0.4)
    enforce_budget(5, "cuda")
    assert card.limit_gb == pytest.approx(4.6)
    assert "PyTorch's allocator may take 4.60 GB, and 0.40 GB are taken outside of it" in log.text
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"6 is more than the 5.79 GB of NVIDIA Test.*--card"):
            enforce_budget(6, "cuda")
        assert card.limit_gb == pytest.approx(4.6)
    with pytest.raises(ConfigError, match=r"0.3 does not hold the CUDA context, 0.40 GB"):
        enforce_budget(0.3, "cuda")
    trainer, limits = cheap_trainer(), []

    def step(_):
        limits.append(round(card.limit_gb, 2))
        card.context_gb += 0.1

    trainer.model.register_forward_pre_hook(lambda *_: setattr(card, "context_gb", 0.7))
    trainer.register_hooks([CallbackHook(after_step=step), EnforceBudget(5, "cuda")])
    trainer.train(0, 2)  # kernels are loaded
    assert limits == [4.3, 4.3]
    assert card.limit_gb == pytest.approx(4.2)
    assert not trainer.model._forward_hooks
    enforce_budget(None, "cuda")
    assert card.share == pytest.approx(1)


def test_libraries_keep_less_unless_the_user_says_how_much(monkeypatch):
    for name in (
        "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "LRU_CACHE_CAPACITY",
    ):
        monkeypatch.setenv(name, "7")
        limit_library_caches()
        assert os.environ[name] == "7"
        monkeypatch.delenv(name)
        limit_library_caches()
        assert 0 < int(os.environ[name]) < 10**4
        monkeypatch.delenv(name)


def test_on_a_gpu_that_others_use_their_memory_is_not_taken_for_the_context(monkeypatch, log):
    card = Card(monkeypatch, total_gb=11, context_gb=0.4, others_gb=4)
    enforce_budget(8, "cuda")
    assert card.limit_gb == pytest.approx(8 - 0.75)
    assert re.search(
        r"BUDGET_GB 8: other processes use the GPU, and only 7.35 GB are left", log.text
    )
    card.context_gb = 0.7  # kernels have been loaded; the others stay
    enforce_budget(8, "cuda")
    assert card.limit_gb == pytest.approx(8 - 0.75 - 0.3)
    card.others_gb = 6  # another job begins, and its memory is not the context
    enforce_budget(8, "cuda")
    assert card.limit_gb == pytest.approx(8 - 1.5)
    enforce_budget(None, "cuda")


def test_auto_on_a_gpu_is_what_is_free_less_a_margin(monkeypatch):
    card = Card(monkeypatch, total_gb=5.79, context_gb=0.4, others_gb=0.3)
    budget_gb = auto_budget_gb("cuda")
    assert budget_gb == pytest.approx(5.79 - 0.25)
    enforce_budget(budget_gb, "cuda")
    assert card.limit_gb < card.free_gb
    card.reserved_gb = 2  # measured again in the middle of a run it is the same
    assert auto_budget_gb("cuda") == pytest.approx(budget_gb)
    enforce_budget(None, "cuda")
    card.others_gb = 3.4
    with pytest.raises(ConfigError, match="auto: nothing is free on the device cuda"):
        auto_budget_gb("cuda")
