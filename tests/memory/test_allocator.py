"""Which allocator runs, as far as it can be told without a GPU."""

import os

import pytest
import torch

from d2_memfit.memory import segments_expand, use_expandable_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.fixture
def cuda_has_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_segments_are_going_to_grow():
    assert segments_expand()
    use_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert segments_expand()


@pytest.mark.parametrize("name", NAMES)
def test_options_of_the_user_stay(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64") == (
        "max_split_size_mb:64"
    )
    assert not segments_expand()
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    assert segments_expand()


@pytest.mark.usefixtures("cuda_has_started")
def test_once_cuda_has_started_it_is_too_late():
    use_expandable_segments()
    assert not any(name in os.environ for name in NAMES)
    assert not segments_expand()
