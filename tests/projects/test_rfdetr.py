# Copyright (c) the d2_memfit developers.
"""rfdetr's own training: memory, recovery and gradients."""

import warnings

import pytest
import torch
from injection import InjectedTrainer, Injector
from tiny import parameters, peak_of, relative_difference

from d2_memfit.planner.steps import Session

pytest.importorskip("rfdetr")
lightning = pytest.importorskip("pytorch_lightning")
from rfdetr.config import RFDETRNanoConfig, RFDETRSegNanoConfig, TrainConfig  # noqa: E402
from rfdetr.models import criterion  # noqa: E402
from rfdetr.training import RFDETRModelModule  # noqa: E402
from rfdetr.utilities.tensors import collate_fn  # noqa: E402
from window_module import WindowModule, job_of  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_IMAGES, NUM_STEPS = 4, 2
CONFIGS = {"boxes": RFDETRNanoConfig, "masks": RFDETRSegNanoConfig}


def configs_of(kind="boxes", patches=4, **kwargs):
    """The geometry of a released model, but smaller, with random weights."""
    patch = CONFIGS[kind].model_fields["patch_size"].default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        geometry = {"resolution": patches * patch, "positional_encoding_size": patches}
        queries = {"num_queries": 30, "num_select": 30, "group_detr": 2}
        model_config = CONFIGS[kind](pretrain_weights=None, num_classes=1, **geometry, **queries)
    options = {"amp_dtype": None, "optimizer": "sgd", "lr": 0.05, "lr_encoder": 0.05}
    options.update(batch_size=NUM_IMAGES, multi_scale=False, warmup_epochs=0, seed=None)
    options.update(kwargs)
    return model_config, TrainConfig(dataset_dir="none", **options)


def sample(index, model_config):
    """An image as rfdetr's dataset gives it, with 1 to 4 objects."""
    rng = torch.Generator().manual_seed(index)
    num = 1 + index % 4
    boxes = torch.rand(num, 4, generator=rng) * 0.2 + torch.tensor([0.3, 0.3, 0.1, 0.1])
    target = {"boxes": boxes, "labels": torch.zeros(num, dtype=torch.int64)}
    side = model_config.resolution
    if model_config.segmentation_head:
        target["masks"] = torch.rand(num, side, side, generator=rng) > 0.5
    return torch.randn(3, side, side, generator=rng), target


def samples(model_config, num):
    return [sample(i, model_config) for i in range(num)]


def test_the_estimate_has_the_bytes_of_a_computed_step(computing):
    model_config, train_config = configs_of("masks")
    job = job_of(model_config, train_config, 5, "cpu")
    dry = Session(job).train(job.training_batch())
    computing()
    computed = Session(job).train(job.training_batch())
    peak, expected = peak_of(dry), peak_of(computed)
    print(f"{peak:,} bytes estimated, {expected:,} computed")
    assert peak == pytest.approx(expected, rel=0.005)


class InjectedModule(WindowModule):
    """Its injector fails at allocations; None never does."""

    injector = None

    def on_train_start(self):
        super().on_train_start()
        if self.injector is not None:
            self._inner.__class__, self._inner.injector = InjectedTrainer, self.injector


def trained(folder, kind=None, injector=None, config=None, num_steps=NUM_STEPS, **options):
    """Lightning's own loop; without a kind, with rfdetr's own module."""
    model_config, train_config = configs_of(**(config or {}))
    torch.manual_seed(0)
    if kind is None:
        module = RFDETRModelModule(model_config, train_config)
    else:
        module = kind(model_config, train_config, job_of(model_config, train_config, 5, **options))
        module.injector = injector
    before = parameters(module.model)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=0.1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    loader = torch.utils.data.DataLoader(
        samples(model_config, NUM_IMAGES * num_steps), NUM_IMAGES, collate_fn=collate_fn
    )
    torch.manual_seed(1)
    trainer.fit(module, loader)
    return before, parameters(module.model), trainer


def test_micro_batches_train_what_rfdetr_trains(tmp_path):
    config = {"patches": 8}  # with fewer, the best queries differ by rounding
    before, expected, plain = trained(tmp_path, config=config)
    _, cut, ours = trained(tmp_path, WindowModule, config=config, device="cpu", micro_batch_size=1)
    off = relative_difference(cut, expected) / relative_difference(before, expected)
    print(f"{off:.0e} of the way from rfdetr's own training")
    assert off < 1e-4
    values = [float(t.callback_metrics["train/loss"]) for t in (ours, plain)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_an_injected_error_leaves_no_trace(tmp_path, monkeypatch):
    # TorchScript optimises a function after its first call, and a sum may differ in a bit.
    for name in ("dice_loss", "sigmoid_ce_loss"):
        monkeypatch.setattr(criterion, f"{name}_jit", getattr(criterion, name))
    options = {"config": {"kind": "masks"}, "device": "cpu", "memfit": {"oom": {"policy": "split"}}}
    counting = Injector([10**9])
    # Later steps may have others, when TorchScript has optimized what it has seen.
    trained(tmp_path, InjectedModule, counting, num_steps=1, **options)
    num = counting.num_allocations
    _, expected, _ = trained(tmp_path, InjectedModule, micro_batch_size=2, **options)
    for where in (0.3, 0.9):  # in the first iteration's forward and backward
        injector = Injector([int(num * where)])
        _, actual, trainer = trained(tmp_path, InjectedModule, injector, **options)
        inner = trainer.lightning_module._inner
        assert (inner.recovery.totals.oom_events, inner.window_sizes) == (1, (2, 2))
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
