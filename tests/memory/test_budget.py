"""Limits are set in processes of their own; a limit on the test run would be one on all tests."""

import os
import sys

import pytest
import torch
from tiny import run_process

from d2_memfit.errors import ConfigError
from d2_memfit.memory import (
    check_budget,
    device_memory,
    enforce_budget,
    process_memory,
    use_expandable_segments,
)


def run_code(code):
    result = run_process([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("value", [0, -1, "6 gigs", True, float("nan"), float("inf")])
def test_what_is_no_budget_is_refused(value):
    with pytest.raises(ConfigError, match=r"MEMFIT.BUDGET_GB must be a number of GB above 0"):
        check_budget(value)


def test_none_limits_nothing():
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    enforce_budget(None, "cpu")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


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
from d2_memfit.engine.window import Window
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


@linux
def test_a_budget_below_what_the_process_has_taken_is_refused():
    with pytest.raises(ConfigError, match=r"0.01 is not more than the \d.* that the process takes"):
        enforce_budget(0.01, "cpu")


def test_devices_without_a_limit_get_a_warning(log):
    enforce_budget(6, "meta")
    assert "MEMFIT.BUDGET_GB 6 is not enforced on the device meta" in log.text


def test_options_of_the_users_allocator_stay(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    use_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:64")
        use_expandable_segments()
        assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64") == (
            "max_split_size_mb:64"
        )
        monkeypatch.delenv(name)


@linux
def test_memory_of_the_process_is_read():
    memory = process_memory()
    assert 2**26 < memory.resident_bytes < 2**36
    assert 2**26 < memory.data_bytes < 2**36
    on_device = device_memory(torch.device("cpu"))
    assert abs(on_device.allocated_bytes - memory.resident_bytes) < 2**26


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_budget_on_a_gpu_cannot_be_exceeded():
    out = run_code(
        """
import torch
from d2_memfit.memory import enforce_budget, is_out_of_memory
enforce_budget(2, "cuda")
torch.empty(2**30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(2**31, dtype=torch.uint8, device="cuda")
except RuntimeError as e:
    assert is_out_of_memory(e)
    print("refused")
free, total = torch.cuda.mem_get_info()
assert torch.cuda.memory_reserved() <= 2 * 2**30
"""
    )
    assert out.split() == ["refused"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_budget_above_the_card_is_refused():
    with pytest.raises(ConfigError, match=r"BUDGET_GB 10000 is more than"):
        enforce_budget(10000, "cuda")
