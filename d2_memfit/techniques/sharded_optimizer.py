# Copyright (c) the d2_memfit developers.
"""An optimizer whose states are sharded. PyTorch takes half a second to import it."""

import inspect
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ..errors import ConfigError
from .modules import has_known_step

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer whose states are sharded over the ranks.

    Its state dict is complete on rank 0 after all ranks have called :meth:`consolidate_state_dict`,
    until the next step.

    Args:
        optimizer: gives class, parameters and options.

    Raises:
        ConfigError: it has its own step, which may need the gradients of all parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        cls = type(optimizer)
        if not has_known_step(cls):
            raise ConfigError(
                f"MEMFIT.OPTIMIZER.ZERO: the step of {cls.__name__} is not PyTorch's, so it may "
                "need the gradients of all parameters, as clipping them together does. Set it False"
            )
        known = inspect.signature(cls.__init__).parameters
        options = {k: v for k, v in optimizer.defaults.items() if k in known}
        super().__init__(optimizer.param_groups, optimizer_class=cls, **options)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._all_state_dicts: list[Any] = []  # they are out of date
        return super().step(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The original empties the entries of its argument.
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"])})
        self.state.clear()  # the states of this rank are in its share
