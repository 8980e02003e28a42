"""The same on a GPU, where an error comes from CUDA's allocator and its kernels run later."""

import gc

import pytest
import torch
from injection import InjectedTrainer, Injector, iterate, seed_all
from tiny import images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine import RecoveryOptions, recovering_inference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def limited():
    """Allows as many bytes more as it is called with, and lifts the limit in the end."""

    def limit(more_bytes):
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + more_bytes
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(allowed / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def cuda_model(family="mask_rcnn"):
    cfg = tiny_cfg(family)
    cfg.MODEL.DEVICE = "cuda"
    return tiny_model(cfg)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def one_iteration(family, precision, fail_at):
    seed_all()
    model = cuda_model(family)
    trainer = InjectedTrainer(
        model, [images(4)], sgd(model), 1, precision, recovery=RecoveryOptions()
    )
    trainer.injector = Injector(fail_at)
    iterate(trainer)
    return trainer


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("family", ["proposal_network", "mask_rcnn", "retinanet"])
def test_a_window_that_failed_somewhere_ends_like_one_that_did_not(family, precision):
    expected = one_iteration(family, precision, [])
    num_allocations = expected.injector.num_allocations
    before = parameters(cuda_model(family))
    moved = relative_difference(parameters(expected.model), before)
    for point in range(5, num_allocations, num_allocations // 5):
        trainer = one_iteration(family, precision, [point])
        assert trainer.recovery.oom_events == 1
        gap = relative_difference(parameters(trainer.model), parameters(expected.model))
        assert gap < 0.3 * moved  # another split has another gradient, but not much


def test_a_batch_that_does_not_fit_is_split(limited, tmp_path):
    model = cuda_model()
    loader = [images(8, size=512)] * 4
    trainer = AccumulatingTrainer(model, loader, sgd(model), recovery=RecoveryOptions())
    one = AccumulatingTrainer(model, [images(1, size=512)] * 2, sgd(model))
    iterate(one)
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    iterate(one, first=1)
    one.optimizer.zero_grad(set_to_none=True)
    limited(3 * (torch.cuda.max_memory_allocated() - base))
    iterate(trainer)
    assert trainer.recovery.oom_events >= 1
    assert trainer.recovery.size.images in (1, 2, 4)
    gc.collect()
    after_first = torch.cuda.memory_allocated()
    iterate(trainer, 3, first=1)
    gc.collect()
    assert torch.cuda.memory_allocated() <= after_first + 2**20


def test_evaluation_goes_on_under_a_limit(limited):
    model = cuda_model().eval()
    batch = images(8, size=512)
    with torch.no_grad():
        expected = model(batch)
        limited(64 * 2**20)
        with recovering_inference(model, RecoveryOptions()):
            actual = model(batch)
    assert [len(a["instances"]) for a in actual] == [len(e["instances"]) for e in expected]
