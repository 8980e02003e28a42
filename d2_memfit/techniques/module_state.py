"""What a forward changes in a module, kept so that it can be put back."""

from numbers import Number
from typing import Optional

from torch import nn

__all__ = ["ModuleState"]


class ModuleState:
    """The buffers of a module, such as running statistics of batch normalisation, and the plain
    numbers (and Nones, which may become numbers) among the attributes of its parts, such as
    RetinaNet's running normaliser; as they are when this is made.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [
            (part, name, buffer, buffer.clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        self._numbers = [(part, _numbers(part)) for part in module.modules()]

    def restore(self) -> None:
        """Go back. It can be done more than once, and between a forward and its backward."""
        for part, name, buffer, value in self._buffers:
            # By way of .data, autograd does not take it for a change of what it has saved.
            buffer.data.copy_(value)
            part._buffers[name] = buffer
        for part, numbers in self._numbers:
            for name in _numbers(part).keys() - numbers.keys():  # it came with the first forward
                delattr(part, name)
            vars(part).update(numbers)


def _numbers(part: nn.Module) -> dict[str, Optional[Number]]:
    return {k: v for k, v in vars(part).items() if v is None or isinstance(v, Number)}
