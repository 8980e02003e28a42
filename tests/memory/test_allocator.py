# Copyright (c) the d2_memfit developers.
"""Which allocator runs, as far as it can be told without a GPU."""

import os

import pytest

from d2_memfit.memory import segments_expand, use_expandable_segments

NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def test_segments_are_going_to_grow():
    assert segments_expand()
    assert not segments_expand(under_budget=False)
    use_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert segments_expand()
    assert segments_expand(under_budget=False)


@pytest.mark.parametrize("name", NAMES)
def test_options_of_the_user_stay(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    assert segments_expand(under_budget=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    assert os.environ[name] == "max_split_size_mb:64"
    assert not segments_expand()
