# Copyright (c) the d2_memfit developers.
import pytest
import torch

from d2_memfit.planner import meta
from d2_memfit.planner.meta import on_meta

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(meta, "_answers", {})


def test_a_kernel_is_asked_once_for_each_signature():
    x, y = torch.rand(2, 3), torch.rand(3, 4)
    first = on_meta(aten.mm.default, (x, y), {})
    assert (first.shape, first.device.type) == ((2, 4), "meta")
    assert on_meta(aten.mm.default, (x + 1, y + 1), {}) is first
    assert on_meta(aten.mm.default, (x, torch.rand(4, 3).t()), {}) is not first
    x = torch.ones(2, dtype=torch.int64)  # equal numbers of different types are different
    results = [on_meta(aten.add.Tensor, (x, other), {}) for other in (1, 1.0)]
    assert [r.dtype for r in results] == [torch.int64, torch.float32]


def test_what_no_kernel_can_answer_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(RuntimeError):
            on_meta(aten.nonzero.default, (torch.rand(3),), {})
