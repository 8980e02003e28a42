# Copyright (c) the d2_memfit developers.
"""transformers' own Trainer as the loop: memory, recovery and gradients."""

import pytest
import torch
from d2_transformers.build import build_transformers_model
from detectron2.layers import FrozenBatchNorm2d
from tiny import parameters, relative_difference
from tiny_transformers import RESOLUTION, draw_the_same_for_each_row, tiny_transformers_cfg

from d2_memfit import Job
from d2_memfit.errors import ConfigError
from d2_memfit.planner.steps import Session

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from d2_transformers import window_trainer  # noqa: E402  needs both

pytestmark = pytest.mark.slow

KINDS = ["rf_detr", "mask2former"]
NUM_IMAGES, MAX_STEPS = 4, 2


def item(index, kind):
    """An image as a processor of transformers gives it, with 1 to 4 objects."""
    rng = torch.Generator().manual_seed(index)
    num = 1 + index % 4
    boxes = torch.rand(num, 4, generator=rng) * 0.2 + torch.tensor([0.3, 0.3, 0.1, 0.1])
    pixels = torch.randn(3, RESOLUTION, RESOLUTION, generator=rng)
    classes = torch.zeros(num, dtype=torch.long)
    if kind == "mask2former":
        masks = torch.zeros(num, RESOLUTION, RESOLUTION)
        for mask, (x, y, width, height) in zip(masks, (boxes * RESOLUTION).long()):
            mask[y : y + height, x : x + width] = 1
        return {"pixel_values": pixels, "mask_labels": masks, "class_labels": classes}
    return {
        "pixel_values": pixels,
        "pixel_mask": torch.ones(RESOLUTION, RESOLUTION, dtype=torch.long),
        "labels": {"class_labels": classes, "boxes": boxes},
    }


def lists_of(items):
    return {name: [i[name] for i in items] for name in items[0]}


def collate(items):
    columns = lists_of(items)
    return {k: v if k.endswith("labels") else torch.stack(v) for k, v in columns.items()}


def build_model(kind, is_exact=False):
    """A model; one whose losses of several images are those of the parts, if it is exact.

    Batch normalisation takes its statistics from all images of a forward.
    """
    torch.manual_seed(0)
    model = build_transformers_model(tiny_transformers_cfg(kind, kind == "mask2former"))
    return FrozenBatchNorm2d.convert_frozen_batchnorm(model) if is_exact else model


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_has_the_bytes_of_a_computed_step(kind, computing):
    items = [item(3, kind), item(7, kind)]
    job = Job(
        model=lambda: build_model(kind),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        images_per_batch=2,
        device="cpu",
        batch=window_trainer.columns_of(lists_of(items)),
        loss_fn=window_trainer.losses_of_columns,
    )
    dry = Session(job).train(job.training_batch(2))
    computing()
    computed = Session(job).train(job.training_batch(2))
    peak, expected = sum(dry.peak().values()), sum(computed.peak().values())
    print(f"{kind}: {peak:,} bytes estimated, {expected:,} computed")
    assert peak == pytest.approx(expected, rel=0.005)


def arguments_of(folder, **kwargs):
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=NUM_IMAGES,
        max_steps=MAX_STEPS,
        logging_steps=1,
        save_steps=1,
        use_cpu=True,
        optim="sgd",
        learning_rate=0.01,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        **kwargs,
    )


def trained(
    kind,
    folder,
    trainer_class=window_trainer.WindowTrainer,
    bf16=False,
    is_exact=False,
    **options,
):
    model = build_model(kind, is_exact)
    dataset = [item(i, kind) for i in range(NUM_IMAGES * MAX_STEPS)]
    trainer = trainer_class(
        model,
        arguments_of(folder, bf16=bf16),
        data_collator=collate,
        train_dataset=dataset,
        **options,
    )
    trainer.train()
    return parameters(model), trainer


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_train_what_transformers_trains(kind, tmp_path, monkeypatch):
    draw_the_same_for_each_row(monkeypatch)
    expected, plain = trained(kind, tmp_path / "plain", transformers.Trainer, is_exact=True)
    cut, ours = trained(kind, tmp_path / "cut", is_exact=True, micro_batch_size=1)
    moved = relative_difference(expected, parameters(build_model(kind, is_exact=True)))
    off = relative_difference(cut, expected) / moved
    print(f"{kind}: {off:.0e} of the way from transformers.Trainer")
    assert off < 1e-5
    logs = [[entry for entry in t.state.log_history if "loss" in entry] for t in (plain, ours)]
    for theirs, entry in zip(*logs):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert entry[name] == pytest.approx(theirs[name], rel=1e-4)
    assert (tmp_path / "cut" / "checkpoint-2" / "optimizer.pt").exists()


def test_a_second_accumulation_is_an_error(tmp_path):
    arguments = arguments_of(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be 1: raise per_dev"):
        window_trainer.WindowTrainer(build_model("rf_detr"), arguments)
