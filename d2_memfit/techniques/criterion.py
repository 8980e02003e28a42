# Copyright (c) the d2_memfit developers.
"""Criteria of DETR-like models, computed for a few objects at a time."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from inspect import signature, unwrap
from itertools import count
from types import FunctionType
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from torch import nn

from ..errors import ConfigError
from ..memory import is_out_of_memory
from ..patching import calls_function, replaced_functions, source_files
from ..random_state import RandomState
from .losses_of_pairs import LossCall
from .matching_objects import SOLVER, MatcherCall
from .modules import add_mixin
from .objects import chunks_of
from .registry import TECHNIQUES, PositiveIntTechnique

__all__ = ["ChunkedCriterion"]

logger = logging.getLogger(__name__)

_SAMPLE = 6  # objects on which chunks are compared with the whole
_TOLERANCE = 1e-2  # relative; rounding of sums in 16 bits
_OF_PAIRS = ("box", "giou", "mask")  # parts of the names of losses that are sums over pairs


@TECHNIQUES.register()
class ChunkedCriterion(PositiveIntTechnique):
    """Makes the criteria of DETR-like models process a few objects of the batch at a time.

    Saves memory with many objects: the costs of all queries with all objects of the batch, the
    matched boxes' intersections with each other, and the masks of all objects as numbers. Each
    exists for one chunk at a time. Costs a second computation of the losses of boxes and masks, in
    the backward, if there are more objects than in a chunk. Matchers must give their costs to
    SciPy's ``linear_sum_assignment``, and losses must be sums over objects. This is tested with the
    first objects.

    Source: Carion et al., "End-to-End Object Detection with Transformers", arXiv:2005.12872, whose
    costs belong to single pairs of query and object.
    """

    tier = "exact"
    part = "model"
    key = "MEMFIT.CRITERION.CHUNK_SIZE"

    @classmethod
    def add_config(cls, cfg: CfgNode) -> None:
        cfg.MEMFIT.setdefault("CRITERION", CfgNode())
        # Objects of the batch that a DETR-like's matcher and criterion handle at a time. The
        # matcher computes costs, the criterion the losses of boxes and masks. None is all.
        cfg.MEMFIT.CRITERION.CHUNK_SIZE = None

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        nodes = ("DETR", "MASK_FORMER", "MaskDINO", "SparseRCNN")
        has_queries = "TRANSFORMERS" in cfg or any(node in cfg.MODEL for node in nodes)
        return {"MEMFIT.CRITERION.CHUNK_SIZE": 32} if has_queries else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        functions = list(_functions_of_criteria(model))
        if not any(call is MatcherCall for *_, call in functions):
            raise ConfigError(
                "MEMFIT.CRITERION.CHUNK_SIZE: the model has no Hungarian matching by SciPy's "
                "linear_sum_assignment, so nothing would change. Set it None"
            )
        chunk_size = cfg.MEMFIT.CRITERION.CHUNK_SIZE
        add_mixin(model, _LooksAtChunks, chunk_size=chunk_size, functions=functions, can_chunk={})
        return model


_Call = Union[MatcherCall, LossCall]
_Function = tuple[type, str, type[_Call]]  # a class, its method, and the class for its chunks


def _functions_of_criteria(model: nn.Module) -> Iterator[_Function]:
    modules = list(model.modules())
    names = [vars(file) for file in source_files(modules)]
    # Models of the transformers library make their criterion in the function of their loss_type.
    losses: list[Any] = [m.loss_function for m in modules if getattr(m, "loss_type", None)]
    names += [unwrap(loss).__globals__ for loss in losses if isinstance(loss, FunctionType)]
    known = [value for file in names for value in list(file.values()) if isinstance(value, type)]
    classes = {base for cls in [*known, *map(type, modules)] for base in cls.__mro__}
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        if not issubclass(cls, nn.Module):
            continue
        if "forward" in vars(cls) and calls_function(cls, SOLVER):
            yield cls, "forward", MatcherCall
        for name, method in vars(cls).items():
            if isinstance(method, FunctionType) and _is_loss_of_pairs(name, method):
                yield cls, name, LossCall


def _is_loss_of_pairs(name: str, method: FunctionType) -> bool:
    parameters = list(signature(method).parameters)
    has_indices = "indices" in parameters[3:-1]  # behind predictions and targets
    return has_indices and any(word in name for word in _OF_PAIRS)


class _LooksAtChunks(nn.Module):
    chunk_size: int
    functions: list[_Function]
    can_chunk: dict[str, bool]  # by function name, once tested

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Classes are changed, not modules, because some models make their criterion in the forward.
        with ExitStack() as stack:
            for cls, name, call in self.functions:
                new = partial(_in_chunks, call, self.chunk_size, self.can_chunk)
                stack.enter_context(replaced_functions([cls], {name: new}))
            return super().forward(*args, **kwargs)


def _in_chunks(
    kind: type[_Call], chunk_size: int, can_chunk: dict[str, bool], function: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(function)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = kind(function, module, args, kwargs)
        if call.counts is not None and len(list(chunks_of(call.counts, chunk_size))) == 1:
            return function(module, *args, **kwargs)
        name = f"{type(module).__qualname__}.{function.__name__}"
        if name not in can_chunk:
            problem = _problem_of_chunks(call)
            can_chunk[name] = problem is None
            if problem is not None:
                logger.warning(
                    "MEMFIT.CRITERION.CHUNK_SIZE: %s runs for all objects at once, %s",
                    name,
                    problem,
                )
        if call.counts is None or not can_chunk[name]:
            return function(module, *args, **kwargs)
        return call.run(chunk_size)[0]

    return run


def _problem_of_chunks(call: _Call) -> Optional[str]:
    """The problem with chunks, found with a few of the objects; None if results are the same."""
    if call.counts is None:
        return "as its arguments have no targets of the common shape"
    counts, state = call.counts, RandomState(call.device)
    num_objects = min(_SAMPLE, sum(counts))
    per_image = next(n for n in count(1) if sum(min(n, c) for c in counts) >= num_objects)
    sample = call.of([slice(0, min(per_image, c)) for c in counts])
    found = []
    try:
        for chunk_size in (sum(counts), 2):
            state.restore()
            with torch.no_grad():
                found.append((sample.run(chunk_size)[1], RandomState(call.device)))
    except Exception as e:
        if is_out_of_memory(e):
            raise
        message = (str(e).splitlines() or [""])[0]
        return f"as it cannot run for some of them ({type(e).__name__}: {message})"
    finally:
        state.restore()
    (whole, state_of_whole), (parts, state_of_parts) = found
    if not state_of_parts.draws_the_same_tensors(state_of_whole):
        return "as it draws other random numbers for some of them"
    is_same = len(whole) == len(parts) and all(map(_are_close, whole, parts))
    return None if is_same else "as what it computes for one depends on the others"


def _are_close(a: Any, b: Any) -> bool:
    a, b = (torch.as_tensor(x).float().nan_to_num() for x in (a, b))
    scale = float(a.abs().max()) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=_TOLERANCE * scale)
