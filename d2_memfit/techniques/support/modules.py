# Copyright (c) the d2_memfit developers.
"""Finding modules by name patterns, and changing the behaviour of a module."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...common.checks import did_you_mean
from ...common.patching import change_class
from ...errors import ConfigError

__all__ = ["add_mixin", "find_modules", "has_known_step", "own_class"]


def find_modules(model: nn.Module, key: str, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules whose names match one of the patterns, as in ``fnmatch``.

    The parts of a matching module are not listed again: "backbone.bottom_up.res4.*" gives the
    blocks of res4. A ``ModuleList`` or ``ModuleDict``, which is never called, is replaced by its
    members.

    Args:
        key: the config key of the patterns, for messages.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{key}: no module of the model matches {pattern!r}"
                f"{did_you_mean(pattern, names, cutoff=0.4)}"
            )
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = module
    return [m for module in found.values() for m in _callable_modules(module)]


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _callable_modules(child)
    else:
        yield module


def add_mixin(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give one module a class that derives from ``mixin`` and its own class.

    Its parameters keep their names, and it is still an instance of its own class. Copies are
    extended too.

    Args:
        attributes: class attributes for the mixin's methods.
    """
    original = type(module)
    base = own_class(module)
    extensions = [*getattr(original, "_extensions", []), (mixin, attributes)]

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _extended, (base, extensions), vars(self)

    members = {
        **attributes,
        "__module__": original.__module__,
        "__reduce_ex__": reduce,
        "_extended_class": base,
        "_extensions": extensions,
    }
    change_class(module, type(original.__name__, (mixin, original), members))


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before :func:`add_mixin`."""
    own: type[nn.Module] = getattr(type(module), "_extended_class", type(module))
    return own


def _extended(base: type[nn.Module], extensions: list[tuple[type, dict[str, Any]]]) -> nn.Module:
    """Rebuild an extended module, for copies and pickles."""
    module = base.__new__(base)
    for mixin, attributes in extensions:
        add_mixin(module, mixin, **attributes)
    return module


def has_known_step(cls: type[Optimizer]) -> bool:
    """Whether an optimizer's step is PyTorch's, or Detectron2's with per-parameter clipping."""
    return cls.step.__module__.startswith(("torch.optim.", "detectron2.solver."))
