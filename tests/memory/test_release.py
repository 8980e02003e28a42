# Copyright (c) the d2_memfit developers.
import torch
from injection import Injector
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.memory import TensorMeter, release_memory


def test_a_backward_that_failed_keeps_nothing():
    from detectron2.utils.events import EventStorage

    model = tiny_model(tiny_cfg("mask_rcnn"))
    batch = images(2)
    held = []
    with EventStorage(), TensorMeter() as meter:
        for after_forward in range(1, 60, 10):
            injector = Injector()
            try:
                with injector:
                    loss = sum(model(batch).values())
                    injector.fail_at = {injector.num_allocations + after_forward}
                    loss.backward()
            except torch.OutOfMemoryError:
                del loss
            model.zero_grad(set_to_none=True)
            held.append(meter.live_bytes)
            release_memory(torch.device("cpu"))
            assert meter.live_bytes == 0
    assert max(held) > 0  # so there was something to release
