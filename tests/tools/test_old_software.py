# Copyright (c) the d2_memfit developers.
"""What earlier releases of PyTorch and cuDNN took."""

import pytest
import torch
from benchmarks.old_software import OldDevice, as_in_cudnn_7, as_in_pytorch
from torch import nn
from torch.nn import functional

from d2_memfit.planner import dry_run
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.timeline import Allocate, Allocation, Free, Timeline

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


def workspace(channels, size, num_images=2, kernel=3, dtype=torch.float32):
    x = torch.empty((num_images, channels, *size), dtype=dtype, device="meta")
    weight = torch.empty((channels, channels, kernel, kernel), dtype=dtype, device="meta")
    return dry_run.workspace_bytes(x, weight, x, (1, 1), 1)


def test_cudnn_7_transforms_tiles():
    half = workspace(256, (25, 42), dtype=torch.float16)
    with as_in_cudnn_7():
        # 168 tiles of the data, with 512 channels, and 256 x 256 filters, of 32 x 17 complex
        # numbers.
        large = workspace(256, (200, 336))
        assert large == pytest.approx((168 * 512 + 256**2) * 32 * 17 * 8, rel=0.01)
        small = workspace(256, (25, 42))  # filters would be larger than the data: Winograd's tiles
        assert small == 36 * 4 * (2 * 7 * 11 * 512 + 256 * 256)
        assert workspace(2048, (50, 84), kernel=1) == 0
        assert workspace(80, (28, 28), num_images=256, kernel=1) == 0  # few channels
        assert workspace(256, (25, 42), dtype=torch.float16) == half
    assert workspace(2048, (50, 84), kernel=1) > 0


def test_gradients_that_a_loop_keeps_are_there_in_the_forward():
    kept = Allocation(100 * MB, "gradients", "setup")
    activation = Allocation(50 * MB, "activations: backbone", "forward")
    new = Allocation(100 * MB, "gradients", "backward")
    events = [Allocate(kept), Free(kept), Allocate(activation), Free(activation), Allocate(new)]
    timeline = Timeline(events=events)
    assert OldDevice.like(CUDA, (1, 9)).use(timeline).allocated_bytes == 150 * MB
    with_cublas = OldDevice.like(CUDA, (1, 13))
    assert with_cublas.use(timeline).allocated_bytes == pytest.approx(166.25 * MB)
    assert not with_cublas.foreach
    assert OldDevice.like(CUDA, (2, 0)) is CUDA
    assert CUDA.use(timeline).allocated_bytes < 120 * MB
