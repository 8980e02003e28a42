# Copyright (c) the d2_memfit developers.
"""transformers' own ``Trainer``, with batches that are cut to fit, and recovery."""

from collections import namedtuple
from typing import Any, Optional

import torch
import transformers
from detectron2.utils.events import EventStorage
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.compat import without_ddp
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.errors import ConfigError

from .families import FAMILIES
from .losses import losses_by_name

__all__ = ["WindowTrainer", "columns_of", "losses_of_columns"]


def columns_of(inputs: Any) -> Any:
    """A batch of transformers, a dict, as equally long columns that can be cut."""
    return namedtuple("Columns", list(inputs))(*inputs.values())


def losses_of_columns(model: nn.Module, batch: Any) -> Any:
    """The ``loss_fn`` of models of transformers, for batches of :func:`columns_of`.

    Losses of this project's families have names, and are divided by the window's objects.
    """

    def joined(name: str, column: Any) -> Any:
        is_stacked = isinstance(column[0], torch.Tensor) and not name.endswith("labels")
        return torch.stack(list(column)) if is_stacked else list(column)

    inputs = {name: joined(name, column) for name, column in batch._asdict().items()}
    bare: Any = without_ddp(model)
    family = FAMILIES.get(bare.config.model_type)
    return model(**inputs).loss if family is None else losses_by_name(model, family, inputs)


class WindowTrainer(transformers.Trainer):
    """A ``Trainer`` whose ``training_step`` runs its batch in micro-batches, and recovers.

    All the rest is transformers': it loads, clips, steps, schedules, logs, evaluates and saves.

    Args:
        micro_batch_size, recovery: as for :class:`AccumulatingTrainer`.

    Raises:
        ConfigError: an argument does not go together with it.
    """

    def __init__(
        self,
        *args: Any,
        micro_batch_size: Optional[int] = None,
        recovery: Optional[RecoveryOptions] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.args.gradient_accumulation_steps > 1:
            raise ConfigError(
                "gradient_accumulation_steps must be 1: raise per_device_train_batch_size, and set "
                "micro_batch_size"
            )
        if self.args.fp16:
            raise ConfigError("fp16 has a loss scale, which WindowTrainer does not know: use bf16")
        self._options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "recovery": recovery}
        self._inner: Optional[AccumulatingTrainer] = None

    def training_step(self, model: nn.Module, inputs: Any, *args: Any) -> torch.Tensor:
        batch = columns_of(self._prepare_inputs(inputs))
        optimizer: Any = self.optimizer
        if self._inner is None or self._inner.model is not model:
            self._inner = AccumulatingTrainer(
                model, (), optimizer, loss_fn=losses_of_columns, **self._options
            )
        model.train()
        with EventStorage(self.state.global_step):
            losses = self._inner.accumulate(batch)
        return torch.tensor(sum(losses.values()), device=self.args.device)
