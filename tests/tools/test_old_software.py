# Copyright (c) the d2_memfit developers.
"""What earlier releases of PyTorch and cuDNN took."""

import pytest
import torch
from benchmarks.old_software import as_in_pytorch
from torch import nn
from torch.nn import functional

from d2_memfit.planner.device import DeviceModel

MB = 2**20
CUDA = DeviceModel.load("cuda")

WEIGHT = torch.randn(1024, 1, requires_grad=True)


def kept_megabytes(function, x):
    """What a function keeps for its backward, without parameters."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor is not WEIGHT and storage.nbytes() >= MB:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x)
    return len(kept)


def cross_entropy(x):
    return functional.cross_entropy(x * 1, torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.parametrize(
    ("function", "now", "before"),
    [
        (lambda x: functional.relu(x * 1) @ WEIGHT, 1, 2),
        (lambda x: nn.ReLU()(x * 1) @ WEIGHT, 1, 2),
        (lambda x: functional.relu(x * 1, inplace=True) @ WEIGHT, 1, 1),
        (lambda x: functional.softmax(x * 1, dim=1), 1, 1),
        (cross_entropy, 1, 2),
    ],
)
def test_inputs_are_kept_and_gradients_are_the_same(function, now, before):
    x = torch.randn(256, 1024, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)
    assert kept_megabytes(function, x) == now
    with as_in_pytorch((1, 9)):
        assert kept_megabytes(function, x) == before
        found = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(found, expected)
    assert functional.relu(x).grad_fn.name() == "ReluBackward0"  # afterwards as ever
