# Copyright (c) the d2_memfit developers.
"""Checks that a checkpoint file is undamaged and fits a model and its optimizer."""

import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["read_lazily", "verify_checksums", "why_it_does_not_fit_the_run"]

# States of PyTorch's optimizers with the shape of their parameter.
_LIKE_PARAMETER = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def verify_checksums(filename: str) -> None:
    """Read a ``torch.save`` file once, in small pieces, to verify its checksums.

    Pickle files and PyTorch's format before 1.6 have no checksums.

    Raises:
        zipfile.BadZipFile, or another error of zipfile: the file is damaged.
    """
    if zipfile.is_zipfile(filename):
        with zipfile.ZipFile(filename) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def read_lazily(filename: str) -> Any:
    """Load a ``torch.save`` file; tensors are read when they are first used.

    Files in the format before PyTorch 1.6 are read at once.
    """
    return torch.load(
        filename, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(filename)
    )


def why_it_does_not_fit_the_run(
    checkpoint: Any, model: nn.Module, checkpointables: Mapping[str, Any]
) -> str:
    """Why a run with this model cannot continue from a checkpoint; "" if it can.

    Args:
        checkpointables: other objects to load, as in fvcore's ``Checkpointer``.
    """
    parts = {"iteration", "trainer", *checkpointables}
    if not isinstance(checkpoint, dict) or "model" not in checkpoint or not parts & set(checkpoint):
        return "it has weights at most, and no iteration to go on from"
    there = {name.removeprefix("module."): value for name, value in checkpoint["model"].items()}
    parameters = dict(model.named_parameters())
    for name, here in model.state_dict().items():
        saved = there.get(name.removeprefix("module."))
        if saved is None and name in parameters:
            return f"it has no {name}"
        if saved is not None and not is_lazy(here) and tuple(saved.shape) != tuple(here.shape):
            return f"{name} is {tuple(saved.shape)} there and {tuple(here.shape)} in this model"
    for key, part in checkpointables.items():
        for optimizer, state in _optimizers(part, checkpoint.get(key)):
            if reason := _why_another_optimizers(optimizer, state):
                return reason
    return ""


def _optimizers(part: Any, state: Any) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Optimizers within a checkpointable, such as a trainer, each with its state."""
    if isinstance(part, torch.optim.Optimizer) and isinstance(state, dict):
        yield part, state
    elif isinstance(state, dict):
        for name in {"optimizer", "_trainer"} & set(state):
            yield from _optimizers(getattr(part, name, None), state[name])


def _why_another_optimizers(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str:
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in state["param_groups"]]
    if here != there:
        return f"its optimizer has groups of {there} parameters, and that of this run of {here}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, p in zip(numbers, parameters):
        for name, value in state["state"].get(number, {}).items():
            if name in _LIKE_PARAMETER and value is not None and value.shape != p.shape:
                return (
                    f"{name} of the optimizer's parameter {number} is {tuple(value.shape)} there "
                    f"and its parameter {tuple(p.shape)}"
                )
    return ""
