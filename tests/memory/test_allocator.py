# Copyright (c) the d2_memfit developers.
"""Which allocator runs, as far as it can be told without a GPU."""

import os

import pytest
import torch

from d2_memfit.memory import segments_expand, use_expandable_segments

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture
def cuda_has_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_segments_are_going_to_grow():
    assert segments_expand()
    assert not segments_expand(under_budget=False)
    use_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert segments_expand()
    assert segments_expand(under_budget=False)


@pytest.mark.parametrize("release", ["2.6.0", "2.9.1", "2.14.1+cu130"])
@pytest.mark.parametrize("name", NAMES)
def test_options_of_the_user_stay_by_a_name_that_pytorch_reads(monkeypatch, name, release):
    """PyTorch before 2.11 does not read the newer name."""
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    assert segments_expand()
    is_read = name == NAMES[0] or release.startswith("2.14")
    assert segments_expand(under_budget=False) == is_read
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert (os.environ.get(NAMES[0]) == "expandable_segments:True") is not is_read
    assert segments_expand() is not is_read


@pytest.mark.usefixtures("cuda_has_started")
def test_once_cuda_has_started_it_is_too_late():
    use_expandable_segments()
    assert not any(name in os.environ for name in NAMES)
    assert not segments_expand()
