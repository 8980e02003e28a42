"""The techniques on a GPU: the same gradients, less of the device's memory."""

import pytest
import torch
from detectron2.utils.events import EventStorage
from injection import seed_all
from tiny import images, relative_difference, tiny_cfg, tiny_model

from d2_memfit.memory import OwnerMeter
from d2_memfit.techniques import TECHNIQUES, apply_techniques

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

EXACT = [name for name, t in sorted(TECHNIQUES) if t.tier == "exact" and t.part == "model"]


def step_on_gpu(names):
    """Gradients, and the peak of the device's memory in bytes."""
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.DEVICE, cfg.INPUT.MASK_FORMAT = "cuda", "bitmask"
    for name in names:
        for pair in dict(TECHNIQUES)[name].settings(cfg).items():
            cfg.merge_from_list(list(pair))
    model = apply_techniques("model", tiny_model(cfg), cfg)
    batch = images(2, size=512)
    for _ in range(2):  # the first warms up
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        seed_all()
        with EventStorage():
            sum(model(batch).values()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("names", [[name] for name in EXACT] + [EXACT])
def test_gradients_are_the_same_and_memory_is_not_more(names):
    expected, plain = step_on_gpu([])
    actual, peak = step_on_gpu(names)
    assert relative_difference(actual, expected) < 1e-4  # kernels add up in any order
    assert peak <= plain
    if len(names) > 1:
        assert peak < 0.8 * plain


def test_owners_add_up_to_what_the_allocator_says():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.DEVICE = "cuda"
    before = torch.cuda.memory_allocated()
    model = tiny_model(cfg)
    batch = images(2, size=512)
    with OwnerMeter(model) as meter, EventStorage():
        losses = model(batch)
        on_device = torch.cuda.memory_allocated() - before
        assert sum(meter.live.values()) == pytest.approx(on_device, rel=0.01)
    del losses
