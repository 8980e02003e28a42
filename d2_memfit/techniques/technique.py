# Copyright (c) the d2_memfit developers.
"""The class of a technique, and how it finds and changes the modules of a model."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import nn

from ..common.checks import (
    Check,
    check_bool,
    check_positive_int,
    check_strings,
    did_you_mean,
    or_none,
    value_of,
)
from ..common.compat import Convolution
from ..common.errors import ConfigError

__all__ = ["Technique", "find_blocks", "find_modules", "has_forward", "wrap_method"]

_LISTS = (nn.ModuleList, nn.ModuleDict)  # never called themselves, only their members
_SERIES = (*_LISTS, nn.Sequential)

# A stage has more than this share of its parameters in series of blocks. Stages of Swin have 0.75
# or more; a decoder layer with its two attentions in a list has a third.
_MOSTLY = 0.7


class Technique:
    """One way to use less memory: the config key that turns it on, and what it does to a job.

    A subclass says in its docstring what it saves, what it costs, and where that is from. The
    paragraph "Key:" says what the values of its key do.

    Attributes:
        tier: "exact" (the same gradients up to float rounding), "precision" (other number formats)
            or "recipe" (something else is trained).
        part: what :meth:`apply` is given.

            - "config": the config, before anything is made from it
            - "model": the model, before DDP is around it
            - "optimizer": the optimizer, with its model's parameters
            - "loader": the function that makes the training loader of a config
            - "evaluation": the model, before it is evaluated; its forward is put back afterwards
        key: the config key that turns it on; "" if Detectron2's own keys do all of it.
        off: the key's default, which turns it off. True or False, names in a list, or None for a
            positive integer: its type decides which other values are right.
        needs: "gpu" and "ranks" if it saves nothing on a CPU, or on one rank; "float16" if a GPU
            computes in it; "evaluation" if an evaluation needs other memory with it.
        changes: what it changes in training, after "changes"; for the tiers precision and recipe.
    """

    tier: str = "exact"
    part: str = "model"
    key: str = ""
    off: Any = None
    needs: frozenset[str] = frozenset()
    changes: str = ""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def check(self) -> Check:
        """The check of the key's values."""
        checks = {bool: check_bool, list: check_strings}
        return checks.get(type(self.off), or_none(check_positive_int))

    def is_on(self, cfg: CfgNode) -> bool:
        """Whether a config turns it on.

        Raises:
            ConfigError: the key has a value that cannot work.
        """
        value = value_of(cfg, self.key) if self.key else self.off
        self.check(self.key, value)
        return bool(value)

    def suggest(self, job: Any, model: nn.Module) -> Any:
        """The key's value that a plan tries; None if it cannot help, or in no plan.

        Args:
            job: a :class:`~d2_memfit.Job`.
            model: the job's model, which may have no values. It decides, and not the names in a
                config, so that jobs of all kinds are offered the same.
        """
        return None

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        """The config keys, and their values, that a plan tries; none if there is nothing to do."""
        value = self.suggest(job, model)
        return {} if value is None else {self.key: value}

    def apply(self, part: Any, value: Any) -> Any:
        """Apply the technique with a value of its key; return the part to use: the same or another.

        Raises:
            ConfigError: it cannot work on this part. The message names the key.
        """
        return part


def find_modules(model: nn.Module, key: str, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules whose names match one of the patterns, as in ``fnmatch``.

    The parts of a matching module are not listed again: "backbone.bottom_up.res4.*" gives the
    blocks of res4. A module without a ``forward``, such as a ``ModuleList``, is replaced by its
    parts.

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


def has_forward(module: nn.Module) -> bool:
    """Whether a call of the module runs a ``forward``."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    if not has_forward(module):
        for child in module.children():
            yield from _callable_modules(child)
    else:
        yield module


def wrap_method(module: nn.Module, name: str, around: Callable[..., Any], *settings: Any) -> None:
    """Replace a method of one module, such as its ``forward``, by a call around it.

    Copies and pickles of the module have it too. Several can be around each other.

    Args:
        around: called with the module, its method, the settings, and the arguments. A function of a
            file, so that it can be pickled.
    """
    method = vars(module).get(name) or partial(_method_of_class, module, name)
    setattr(module, name, partial(around, module, method, *settings))


def _method_of_class(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the method that the class has now: others replace it for a while."""
    return getattr(type(module), name)(module, *args, **kwargs)


def find_blocks(model: nn.Module) -> list[str]:
    """The names of a model's blocks, in order. No block is inside another one.

    A block has parameters, is called, and is one of these:

    - a module whose parts are single layers: a residual block, an attention, a box or mask head
    - one of several members of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that have the
      same class and are not single layers: an encoder or decoder layer, a ViT's block, a head of a
      series

    A ``Sequential`` of blocks of the first kind, such as a stage of a ResNet, is listed too, before
    them. A longer part that repeats itself, such as a stage of a Swin, is not listed, but its
    blocks are.
    """
    members: set[int] = set()
    for series in model.modules():
        if isinstance(series, _SERIES):
            members.update(map(id, _repeated(series)))
    return list(_walk(model, "", members, set()))


def _walk(module: nn.Module, prefix: str, members: set[int], seen: set[int]) -> Iterator[str]:
    for child_name, child in module.named_children():
        name = prefix + child_name
        if id(child) in seen or isinstance(child, torch.jit.ScriptModule):
            continue
        seen.add(id(child))
        if _is_stage(child):
            yield name
            yield from (f"{name}.{block}" for block, _ in child.named_children())
        elif _is_made_of_layers(child) or (id(child) in members and not _repeats_itself(child)):
            yield name
        else:
            yield from _walk(child, f"{name}.", members, seen)


def _repeated(series: nn.Module) -> list[nn.Module]:
    """Members that share their class with another member, without single layers."""
    members = [m for m in series.children() if has_forward(m) and not _is_layer(m)]
    counts = Counter(map(type, members))
    return [m for m in members if counts[type(m)] > 1 and _num_parameters(m)]


def _is_stage(module: nn.Module) -> bool:
    blocks = list(module.children())
    is_sequence = isinstance(module, nn.Sequential) and len(blocks) > 0
    return is_sequence and all(map(_is_made_of_layers, blocks))


def _is_made_of_layers(module: nn.Module) -> bool:
    if not has_forward(module) or _is_layer(module) or not _num_parameters(module):
        return False
    return all(map(_is_layer, _parts(module)))


def _repeats_itself(module: nn.Module) -> bool:
    """Whether a module is mostly one or several series of blocks."""
    series = [m for m in module.modules() if isinstance(m, _SERIES)]
    blocks = [block for s in series for block in ([s] if _is_stage(s) else _repeated(s))]
    return _num_parameters(nn.ModuleList(blocks)) > _MOSTLY * _num_parameters(module)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module's children; a list is replaced by its members."""
    for child in module.children():
        if isinstance(child, _LISTS):
            yield from _parts(child)
        else:
            yield child


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is a single layer; Detectron2's convolutions contain their normalisation."""
    return isinstance(module, Convolution) or not any(True for _ in module.children())


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
