# Copyright (c) the d2_memfit developers.
"""Iterations with injected out-of-memory errors, and comparisons of their results."""

from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch

from ..compat.pytorch import TorchDispatchMode, storage_id
from ..engine.ranks import RankReport
from ..engine.train_loop import AccumulatingTrainer
from ..engine.window import MicroBatch, Window
from ..memory import storages

__all__ = ["InjectedTrainer", "Injector", "relative_difference"]


class Injector(TorchDispatchMode):
    """A mode that counts new tensors, and raises an out-of-memory error at some of them.

    Args:
        fail_at: numbers of allocations, from 1.
    """

    def __init__(self, fail_at: Iterable[int] = ()) -> None:
        super().__init__()
        self.fail_at = set(fail_at)
        self.num_allocations = 0
        self._has_failed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for TensorMeter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(storage) for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage_id(storage) not in given:
                self.num_allocations += 1
                if self.num_allocations in self.fail_at:
                    self._has_failed = True
                    raise torch.OutOfMemoryError(f"injected at {self.num_allocations}")
        return result

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        # TorchScript keeps the text of an allocator's error, and nothing of one from Python.
        if self._has_failed and "TorchScript" in str(error):
            raise torch.OutOfMemoryError(f"injected at {self.num_allocations}") from error


class InjectedTrainer(AccumulatingTrainer):
    """A trainer whose allocations in forward and backward go through an injector.

    Attributes:
        window_sizes: final sizes of the last window's micro-batches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.injector = Injector()
        self.window_sizes: tuple[int, ...] = ()

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        with self.injector:
            return super()._forward(micro_batch)

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        with self.injector:
            super()._backward(loss, weight)

    def _vote(self, window: Window, *args: Any) -> list[RankReport]:
        self.window_sizes = tuple(m.num_images for m in window.micro_batches)
        return super()._vote(window, *args)


def relative_difference(
    actual: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]
) -> float:
    """Norm of the difference of tensors with the same names over the norm of ``expected``."""
    actual_values = torch.cat([actual[name].double().flatten() for name in expected])
    expected_values = torch.cat([value.double().flatten() for value in expected.values()])
    return ((actual_values - expected_values).norm() / expected_values.norm()).item()
