# Copyright (c) the d2_memfit developers.
"""An exponential moving average of a model's weights, which takes the place of the model's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

__all__ = ["AveragedWeights", "average_of", "with_averaged_weights"]


class AveragedWeights:
    """PyTorch's ``AveragedModel`` of a model's trained parameters and its buffers.

    Frozen parameters are left out: their average is themselves. The first update copies the
    weights. Model and average exchange their tensors, without a copy, for evaluations and
    checkpoints: :func:`with_averaged_weights`.

    Args:
        model: without DDP around it.
        decay: the average's part in the next one, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._average = AveragedModel(
            _Tensors(model, self._names),
            multi_avg_fn=get_ema_multi_avg_fn(decay),
            use_buffers=True,
        )
        self._is_in_model = False

    def keep_for(self, model: nn.Module) -> None:
        """Let :func:`average_of` find it, as long as the model is there."""
        _AVERAGES[model] = self

    def tensors(self) -> list[torch.Tensor]:
        module = self._average.module
        return [*module.parameters(), *module.buffers()]

    def update(self, model: nn.Module) -> None:
        """Take the model's weights into the average. Call it once per optimizer step."""
        self._average.update_parameters(_Tensors(model, self._names))

    @contextmanager
    def in_model(self, model: nn.Module) -> Iterator[None]:
        if self._is_in_model or self._average.n_averaged == 0:
            yield
            return
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def _exchange(self, model: nn.Module) -> None:
        own = _Tensors(model, self._names)
        for ours, theirs in zip(self.tensors(), [*own.parameters(), *own.buffers()]):
            ours.data, theirs.data = theirs.data, ours.data
        self._is_in_model = not self._is_in_model

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self._average.state_dict(), "is_in_model": self._is_in_model}

    def load_state_dict(self, state: dict[str, Any], model: nn.Module) -> None:
        """Go on from a checkpoint, whose other weights the model has loaded already."""
        self._average.load_state_dict(state["weights"])
        self._is_in_model = state["is_in_model"]
        if self._is_in_model:
            self._exchange(model)


class _Tensors(nn.Module):
    """The tensors of a model to be averaged, without its code, which may not be copied."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        parameters = dict(model.named_parameters())
        for name in names:
            self.register_parameter(name.replace(".", "/"), parameters[name])
        for name, buffer in model.named_buffers():
            self.register_buffer(name.replace(".", "/"), buffer)


_AVERAGES: "WeakKeyDictionary[nn.Module, AveragedWeights]" = WeakKeyDictionary()


def average_of(model: nn.Module) -> Optional[AveragedWeights]:
    """The average that is kept for a model."""
    return _AVERAGES.get(model)


@contextmanager
def with_averaged_weights(model: nn.Module) -> Iterator[None]:
    """While open, a model has its averaged weights, if an average is kept for it."""
    average = average_of(model)
    if average is None:
        yield
        return
    with average.in_model(model):
        yield
