# Copyright (c) the d2_memfit developers.
"""The calls of the model's blocks in a dry run."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from ...techniques.blocks import find_blocks
from .dry_run import DryRun
from .timeline import BlockCall, Work

__all__ = ["noted_calls"]


@contextmanager
def noted_calls(model: nn.Module, run: DryRun) -> Iterator[None]:
    """While open, record in the timeline the calls of blocks for which autograd saves tensors.

    Calls in a backward, which recompute a block, are not recorded.
    """
    begun: list[tuple[int, Work]] = []

    def begin(*_: Any) -> None:
        begun.append((len(run.timeline.events), copy(run.timeline.work[run.phase])))

    def end(name: str, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        position, before = begun.pop()
        if run.phase != "forward" or not torch.is_grad_enabled():
            return
        call = BlockCall(
            name,
            position,
            len(run.timeline.events),
            run.timeline.work[run.phase] - before,
            run.allocations_of((args, kwargs)),
            run.allocations_of(result),
        )
        run.timeline.calls.append(call)

    handles = []
    for name in find_blocks(model):
        block = model.get_submodule(name)
        handles += [
            block.register_forward_pre_hook(begin),
            block.register_forward_hook(partial(end, name), with_kwargs=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
