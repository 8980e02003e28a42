# Copyright (c) the d2_memfit developers.
"""What a model asks of CUDA on a machine without a GPU, and on one with it."""

import pytest
import torch
from torch.cuda.amp import autocast as autocast_of_old
from torch.utils.checkpoint import checkpoint

from d2_memfit.planner.stand_ins import casts_of_cuda, cuda_as_cpu

X = torch.ones(2, 2)
MADE_BEFORE = torch.autocast("cuda", enabled=False)

MOVES = {
    "cuda": lambda: X.cuda(),
    "to": lambda: X.to("cuda"),
    "to, by keyword": lambda: X.to(device="cuda", dtype=torch.float16),
    "to, with an index": lambda: X.to(0),
    "new_zeros": lambda: X.new_zeros(2, device="cuda"),
    "pin_memory": lambda: X.pin_memory(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_tensors_stay_on_the_cpu(move):
    with cuda_as_cpu():
        assert move().device.type == "cpu"


def test_streams_events_and_numbers_have_nothing_to_say():
    with cuda_as_cpu(), torch.device("cuda"):
        assert torch.zeros(2).device.type == "cpu"
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.cuda.device(X.device):
            X.record_stream(stream)
            event.record()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert event.query()
        assert event.elapsed_time(event) == 0
        assert torch.cuda.max_memory_allocated() == torch.cuda.current_device() == 0


def test_autocast_is_that_of_the_cpu_with_the_format_of_cuda():
    with cuda_as_cpu():
        with torch.autocast("cuda"):
            assert (X @ X).dtype == torch.float16
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_gpu_dtype() == torch.float16
        with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
            assert (X @ X).dtype == torch.bfloat16
        with autocast_of_old(), cuda_as_cpu(casts_of_cuda()):
            assert (X @ X).dtype == torch.float16
            assert X.half().softmax(dim=0).dtype == torch.float32
        assert (X @ X).dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: autocast_of_old(enabled=False),
        lambda: torch.autocast("cuda", enabled=False),
        lambda: MADE_BEFORE,
    ],
)
def test_an_autocast_can_be_disabled_within_another(make):
    with cuda_as_cpu(), torch.autocast("cpu", dtype=torch.bfloat16):
        with make():
            assert (X @ X).dtype == torch.float32
        assert make()(lambda: X @ X)().dtype == torch.float32
        assert (X @ X).dtype == torch.bfloat16
    assert MADE_BEFORE.device == "cuda"


class _Doubled(torch.autograd.Function):
    """As operators are written that mix formats, and move tensors in their backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert x.dtype == torch.float32
        assert not torch.is_autocast_enabled("cuda")
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, gradient):
        return gradient.cuda() * torch.full((1,), 2.0, device="cuda")


def test_a_backward_and_what_it_computes_again_have_it_too():
    x = torch.ones(2, 2, requires_grad=True)
    with cuda_as_cpu():
        with torch.autocast("cuda"):
            y = checkpoint(
                lambda x: _Doubled.apply((x @ X.cuda()).to("cuda")), x, use_reentrant=False
            )
        y.sum().backward()
    assert x.grad.equal(torch.full((2, 2), 4.0))
