# Copyright (c) the d2_memfit developers.
"""The optimizer of ZeRO, stage 1: PyTorch's, which can be saved and resumed on any ranks."""

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer whose states are sharded over the ranks.

    Its state dict is complete on rank 0 after all ranks have called :meth:`consolidate_state_dict`,
    until the next step.
    """

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._all_state_dicts: list[Any] = []  # they are out of date
        return super().step(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The original empties the entries of its argument.
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"])})
        self.state.clear()  # the states of this rank are in its share
