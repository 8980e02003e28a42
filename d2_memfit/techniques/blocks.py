# Copyright (c) the d2_memfit developers.
"""Finding the blocks of a model: repeated parts, and parts made of single layers."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from ..common.compat import Convolution
from .technique import has_forward

__all__ = ["find_blocks"]

_LISTS = (nn.ModuleList, nn.ModuleDict)  # never called themselves, only their members
_SERIES = (*_LISTS, nn.Sequential)

# A stage has more than this share of its parameters in series of blocks. Stages of Swin have 0.75
# or more; a decoder layer with its two attentions in a list has a third.
_MOSTLY = 0.7


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
