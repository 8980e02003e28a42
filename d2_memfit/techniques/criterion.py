# Copyright (c) the d2_memfit developers.
"""Criteria of DETR-like models, computed for a few objects at a time."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature, unwrap
from itertools import count
from types import FunctionType
from typing import Any, Optional, Union

import numpy as np
import torch
from detectron2.config import CfgNode
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..common.patching import (
    Groups,
    calls_function,
    files_of_classes,
    has_name,
    knows_function,
    source_files,
)
from ..common.random_state import RandomState
from ..compat.pytorch import tree_iter
from ..memory import is_out_of_memory
from .adapters import ADAPTERS, Adapter, AdapterTechnique
from .registry import TECHNIQUES, PositiveIntTechnique
from .support import (
    ReplacesInForward,
    add_mixin,
    chunks_of,
    device_of,
    is_targets,
    objects_per_image,
    own_class,
    recompute_in_backward,
    sharing_padded_masks,
    take_objects,
    with_packed_masks,
)

__all__ = ["ChunkedCriterion"]

logger = logging.getLogger(__name__)

_SAMPLE = 6  # objects on which chunks are compared with the whole
_TOLERANCE = 1e-2  # relative; rounding of sums in 16 bits
_SOLVER = "linear_sum_assignment"  # of SciPy
_OF_PAIRS = ("box", "giou", "mask")  # parts of the names of losses that are sums over pairs
_SAMPLING = ("point_sample", "sample_point", "grid_sample")  # of points, instead of all pixels
# Functions that copy masks into zeros of the padded size.
_PADDING = ("prepare_targets", "nested_tensor_from_tensor_list", "_pad_images_to_max_in_batch")

_Call = Union["_MatcherCall", "_LossCall"]
# A class, its method, and what it does: "matcher", "loss", "loss of points" or "padding".
_Function = tuple[type, str, str]
_Matrix = NDArray[Any]
_Solve = Callable[..., tuple[_Matrix, _Matrix]]


@TECHNIQUES.register()
class ChunkedCriterion(AdapterTechnique, PositiveIntTechnique):
    """Makes the criteria of DETR-like models process a few objects of the batch at a time.

    Saves memory with many objects:

    - the masks of all objects as numbers, and copies of them. They stay bits, of which points are
      sampled
    - the costs of all queries with all objects of the batch. Matchers must give their costs to
      SciPy's ``linear_sum_assignment``
    - the matched boxes' intersections with each other, and matched masks of full size. These losses
      must be sums over objects

    Costs nothing for masks and matching. Losses of boxes and of masks of full size are computed a
    second time, in the backward, if there are more objects than in a chunk. Whether chunks give the
    same is tested with the first objects.

    Source: Carion et al., "End-to-End Object Detection with Transformers", arXiv:2005.12872, whose
    costs belong to single pairs of query and object.
    """

    # Objects of the batch that a DETR-like's matcher and criterion handle at a time. The
    # matcher computes costs, the criterion the losses of boxes and masks. None: all.
    key = "MEMFIT.CRITERION.CHUNK_SIZE"
    what = "Hungarian matching by SciPy's linear_sum_assignment"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        nodes = ("DETR", "MASK_FORMER", "MaskDINO", "SparseRCNN")
        has_queries = "TRANSFORMERS" in cfg or any(node in cfg.MODEL for node in nodes)
        return {"MEMFIT.CRITERION.CHUNK_SIZE": 128} if has_queries else {}


@ADAPTERS.register()
class ObjectsOfCriterion(Adapter, ReplacesInForward):
    """A model with a criterion.

    Methods of classes are replaced, because some models make their criterion in the forward.
    """

    technique = "ChunkedCriterion"
    attribute = "objects_at_a_time"
    objects_at_a_time: int
    functions: list[_Function]
    can_chunk: dict[str, bool]  # by function name, once tested

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        has_matcher = any(kind == "matcher" for *_, kind in _functions_of_criteria(model))
        return [model] if has_matcher else []

    @classmethod
    def add_to(cls, module: nn.Module, value: Any) -> None:
        functions = list(_functions_of_criteria(module))
        add_mixin(module, cls, objects_at_a_time=value, functions=functions, can_chunk={})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            bound = signature(own_class(self).forward).bind(self, *args, **kwargs)
            for name, value in bound.arguments.items():
                bound.arguments[name] = with_packed_masks(value, name)
            args, kwargs = bound.args[1:], bound.kwargs
        return super().forward(*args, **kwargs)

    def replaced(self) -> Groups:
        solver = _Solver()
        in_chunks = partial(partial, _in_chunks, self.objects_at_a_time, self.can_chunk)
        of_kind = {
            "matcher": in_chunks(partial(_MatcherCall, solver)),
            "loss": in_chunks(_LossCall),
            "padding": sharing_padded_masks,
        }
        groups: list[tuple[list[Any], dict[str, Any]]] = [
            ([cls], {name: of_kind[kind]}) for cls, name, kind in self.functions if kind in of_kind
        ]
        files = files_of_classes(base for cls, *_ in self.functions for base in cls.__mro__)
        of_files = {_SOLVER: solver.instead_of, **dict.fromkeys(_PADDING, sharing_padded_masks)}
        groups += [
            (files, {name: new}) for name, new in of_files.items() if knows_function(files, name)
        ]
        return groups


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
        if "forward" in vars(cls) and calls_function(cls, _SOLVER):
            yield cls, "forward", "matcher"
        for name, method in vars(cls).items():
            if not isinstance(method, FunctionType):
                continue
            if name in _PADDING:
                yield cls, name, "padding"
            elif _is_loss_of_pairs(name, method):
                code = unwrap(method).__code__
                samples = any(has_name(code, sampling) for sampling in _SAMPLING)
                yield cls, name, "loss of points" if samples else "loss"


def _is_loss_of_pairs(name: str, method: FunctionType) -> bool:
    parameters = list(signature(method).parameters)
    # Behind predictions and targets.
    return "indices" in parameters[3:-1] and any(word in name for word in _OF_PAIRS)


def _in_chunks(
    chunk_size: int,
    can_chunk: dict[str, bool],
    kind: Callable[..., _Call],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    @wraps(function)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = kind(function, module, args, kwargs)
        size = chunk_size * call.pairs_per_object
        if call.num_per_image is not None and len(list(chunks_of(call.num_per_image, size))) == 1:
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
        if call.num_per_image is None or not can_chunk[name]:
            return function(module, *args, **kwargs)
        return call.run(size)[0]

    return run


def _problem_of_chunks(call: _Call) -> Optional[str]:
    """The problem with chunks, found with a few of the objects; None if results are the same."""
    if call.num_per_image is None:
        return "because its arguments have no targets of a known form"
    num_per_image = call.num_per_image
    state = RandomState(call.device)
    num_objects = min(_SAMPLE, sum(num_per_image))
    per_image = next(n for n in count(1) if sum(min(n, c) for c in num_per_image) >= num_objects)
    sample = call.restricted_to([slice(0, min(per_image, c)) for c in num_per_image])
    found = []
    try:
        for chunk_size in (sum(num_per_image), 2):
            state.restore()
            with torch.no_grad():
                found.append((sample.run(chunk_size)[1], RandomState(call.device)))
    except Exception as e:
        if is_out_of_memory(e):
            raise
        message = (str(e).splitlines() or [""])[0]
        return f"because it cannot run for some of them ({type(e).__name__}: {message})"
    finally:
        state.restore()
    (whole, state_of_whole), (parts, state_of_parts) = found
    if not state_of_parts.draws_the_same_tensors(state_of_whole):
        return "because it draws other random numbers for some of them"
    is_same = len(whole) == len(parts) and all(map(_are_close, whole, parts))
    return None if is_same else "because one result depends on the other objects"


def _are_close(a: Any, b: Any) -> bool:
    a, b = (torch.as_tensor(x).float().nan_to_num() for x in (a, b))
    scale = float(a.abs().max()) if a.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=_TOLERANCE * scale)


class _MatcherCall:
    """A call of a Hungarian matcher.

    The matcher computes costs, queries x objects, and gives those of each image to
    ``linear_sum_assignment``.

    Args:
        solver: finds the pairs.
        forward: called as ``forward(matcher, *args, **kwargs)``.
        args, kwargs: predictions, and lists with the targets of each image.

    Attributes:
        num_per_image: numbers of objects in each image; None if the arguments do not tell.
        device: device of the predictions.
    """

    pairs_per_object = 1

    def __init__(
        self,
        solver: "_Solver",
        forward: Callable[..., Any],
        matcher: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._solver = solver
        self._forward = forward
        self._matcher = matcher
        self._args = args
        self._kwargs = kwargs
        self.device = device_of((args, kwargs))
        targets = [value for value in (*args, *kwargs.values()) if is_targets(value)]
        counts = [objects_per_image(target) for target in targets]
        is_known = bool(counts) and all(count == counts[0] for count in counts)
        self.num_per_image: Optional[list[int]] = counts[0] if is_known else None

    def restricted_to(self, chosen: Sequence[slice]) -> "_MatcherCall":
        """The call with only some objects of each image."""

        def select(value: Any) -> Any:
            return take_objects(value, chosen) if is_targets(value) else value

        args = [select(value) for value in self._args]
        kwargs = {name: select(value) for name, value in self._kwargs.items()}
        return _MatcherCall(self._solver, self._forward, self._matcher, args, kwargs)

    def run(self, chunk_size: int) -> tuple[Any, list[_Matrix]]:
        """Match with costs computed in chunks.

        Args:
            chunk_size: objects whose costs are computed at a time.

        Returns:
            The matcher's result; and the matched matrices, with the numbers of pairs of each image.
        """
        assert self.num_per_image is not None
        state = RandomState(self.device)
        matrices = _Matrices()
        chunks = list(chunks_of(self.num_per_image, chunk_size))
        for chunk in chunks:
            state.restore()  # all chunks compare masks at the same points
            matrices.start_chunk(is_last=chunk is chunks[-1])
            call = self.restricted_to(chunk)
            with self._solver.gathering(matrices):
                result = call._forward(call._matcher, *call._args, **call._kwargs)
        return result, [*matrices.whole, np.array([len(queries) for queries, _ in result])]


class _Solver:
    """SciPy's ``linear_sum_assignment``, except while columns of a matrix are gathered."""

    def __init__(self) -> None:
        self._matrices: Optional[_Matrices] = None

    def instead_of(self, solve: _Solve) -> _Solve:
        def linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
            solving = solve if self._matrices is None else self._matrices.gathering(solve)
            return solving(*args, **kwargs)

        return linear_sum_assignment

    @contextmanager
    def gathering(self, matrices: "_Matrices") -> Iterator[None]:
        self._matrices = matrices
        try:
            yield
        finally:
            self._matrices = None


class _Matrices:
    """Gathers columns that are computed chunk by chunk, and matches complete matrices.

    Attributes:
        whole: the complete matrices, in the order in which the matcher uses them.
    """

    def __init__(self) -> None:
        self.whole: list[_Matrix] = []
        self._columns: list[list[_Matrix]] = []
        self._is_last = False
        self._position = 0

    def start_chunk(self, is_last: bool) -> None:
        """Gather the matrices of the next chunk."""
        self._is_last = is_last
        self._position = 0

    def gathering(self, solve: _Solve) -> _Solve:
        def linear_sum_assignment(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
            if self._position == len(self._columns):
                self._columns.append([])
            columns = self._columns[self._position]
            columns.append(np.array(cost_matrix))
            self._position += 1
            if not self._is_last:
                num = min(columns[-1].shape)
                return np.arange(num), np.arange(num)
            self.whole.append(np.concatenate(columns, axis=1))
            columns.clear()
            return solve(self.whole[-1], *args, **kwargs)

        return linear_sum_assignment


class _LossCall:
    """A call of a criterion's loss: (predictions, targets, indices, number of objects, ...).

    Args:
        loss: the criterion's method, called as ``loss(criterion, *args, **kwargs)``.
        args: ``indices`` holds, for each image, the numbers of queries and of their objects.

    Attributes:
        num_per_image: numbers of pairs in each image; None if the arguments have another form.
        pairs_per_object: more than one if groups of queries are each matched with all objects.
        device: device of the predictions.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        criterion: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._loss = loss
        self._criterion = criterion
        bound = signature(loss).bind(criterion, *args, **kwargs)
        self._arguments = list(bound.args[1:])
        self._kwargs = bound.kwargs
        self._position = list(signature(loss).parameters).index("indices") - 1
        targets, self._indices = self._arguments[self._position - 1 : self._position + 1]
        self.num_per_image: Optional[list[int]] = None
        self.pairs_per_object = 1
        objects = objects_per_image(targets) if is_targets(targets) else None
        if objects and _are_pairs(self._indices):
            self.num_per_image = [len(queries) for queries, _ in self._indices]
            self.pairs_per_object = max(1, *map(_ratio, self.num_per_image, objects))
        self.device = device_of(self._arguments)

    def restricted_to(self, chosen: Sequence[slice]) -> "_LossCall":
        """The call with only some pairs of each image, and their objects."""
        arguments = list(self._arguments)
        pairs = [(q[part], o[part]) for (q, o), part in zip(self._indices, chosen)]
        targets = arguments[self._position - 1]
        arguments[self._position - 1] = take_objects(targets, [objects for _, objects in pairs])
        arguments[self._position] = [(q, torch.arange(len(o), device=o.device)) for q, o in pairs]
        return _LossCall(self._loss, self._criterion, arguments, self._kwargs)

    def run(self, chunk_size: int) -> tuple[Any, list[torch.Tensor]]:
        """Compute the loss in chunks.

        Args:
            chunk_size: pairs whose losses are computed at a time, and again in the backward.

        Returns:
            The result of the loss, and the values in it.
        """
        assert self.num_per_image is not None
        results = []
        for chunk in chunks_of(self.num_per_image, chunk_size):
            run = partial(self._run_chunk, chunk)
            if torch.is_grad_enabled():
                # Mask2Former's losses are TorchScript, which cannot be stopped half-way.
                with set_checkpoint_early_stop(False):
                    results.append(recompute_in_backward(self._criterion, run, *self._arguments))
            else:
                results.append(run())
        total = _sum(results)
        return total, [torch.as_tensor(value).detach() for value in tree_iter(total)]

    def _run_chunk(self, chunk: Sequence[slice], *_: Any) -> Any:
        call = self.restricted_to(chunk)
        return call._loss(call._criterion, *call._arguments, **call._kwargs)


def _ratio(num_pairs: int, num_objects: int) -> int:
    return math.ceil(num_pairs / max(num_objects, 1))


def _are_pairs(indices: Any) -> bool:
    return isinstance(indices, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and torch.is_tensor(pair[0])
        for pair in indices
    )


def _sum(results: Sequence[Any]) -> Any:
    if isinstance(results[0], dict):
        return {name: sum(result[name] for result in results) for name in results[0]}
    return sum(results)
