# Copyright (c) the d2_memfit developers.
"""Criteria of DETR-like models, computed for a few objects at a time."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import BoundArguments, signature, unwrap
from itertools import count
from types import FunctionType
from typing import Any, Optional

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
    classes_of_criteria,
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

    Costs nothing for points of masks, boxes and matching. Losses of masks of full size are computed
    a second time, in the backward, if there are more pairs than in a chunk. Whether chunks give the
    same is tested with the first objects.

    Source: Carion et al., "End-to-End Object Detection with Transformers", arXiv:2005.12872, whose
    costs belong to single pairs of query and object.

    Key: Objects of the batch that a DETR-like's matcher and criterion handle at a time. The matcher
    computes costs, the criterion the losses of matched boxes, and of masks of full size, for which
    32 save more. None: all.
    """

    key = "MEMFIT.CRITERION.CHUNK_SIZE"
    what = "Hungarian matching by SciPy's linear_sum_assignment"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        nodes = ("DETR", "MASK_FORMER", "MaskDINO", "SparseRCNN")
        if "TRANSFORMERS" not in cfg and not any(node in cfg.MODEL for node in nodes):
            return {}
        # A pair of masks of full size is as large as hundreds of pairs of sampled ones.
        mask_former = cfg.MODEL.get("MASK_FORMER", {"TRAIN_NUM_POINTS": 0})
        return {cls.key: 512 if "TRAIN_NUM_POINTS" in mask_former else 32}


@ADAPTERS.register()
class ObjectsOfCriterion(Adapter, ReplacesInForward):
    """A model with a criterion.

    Methods of classes are replaced, because some models make their criterion in the forward.
    """

    technique = "ChunkedCriterion"
    attribute = "objects_at_a_time"
    objects_at_a_time: int
    functions_of_criteria: list[_Function]
    can_chunk: dict[str, bool]  # by function name, once tested

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        has_matcher = any(kind == "matcher" for *_, kind in _functions_of_criteria(model))
        return [model] if has_matcher else []

    @classmethod
    def add_to(cls, module: nn.Module, value: Any) -> None:
        functions = list(_functions_of_criteria(module))
        attributes = {"functions_of_criteria": functions, "can_chunk": {}}
        add_mixin(module, cls, objects_at_a_time=value, **attributes)

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
        functions = self.functions_of_criteria
        groups: list[tuple[list[Any], dict[str, Any]]] = [
            ([cls], {name: of_kind[kind]}) for cls, name, kind in functions if kind in of_kind
        ]
        files = files_of_classes(base for cls, *_ in functions for base in cls.__mro__)
        of_files = {_SOLVER: solver.instead_of, **dict.fromkeys(_PADDING, sharing_padded_masks)}
        groups += [
            (files, {name: new}) for name, new in of_files.items() if knows_function(files, name)
        ]
        return groups


def _functions_of_criteria(model: nn.Module) -> Iterator[_Function]:
    known = classes_of_criteria(model, source_files(model.modules()))
    for cls in sorted(known, key=lambda cls: cls.__qualname__):
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
    kind: Callable[..., "_Call"],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    @wraps(function)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = kind(module, function, signature(function).bind(module, *args, **kwargs))
        num_objects = sum(call.num_per_image or [])
        if call.num_per_image is not None and num_objects <= chunk_size:
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
        return call.run(chunk_size)[0]

    return run


def _problem_of_chunks(call: "_Call") -> Optional[str]:
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


class _Call:
    """A call of a matcher or of a loss, that can run for a few objects at a time.

    Args:
        module: the matcher, or the criterion.
        function: its method.
        bound: the method's arguments.

    Attributes:
        num_per_image: numbers of objects, or pairs, in each image; None if the arguments do not
            tell.
        device: device of the predictions.
    """

    num_per_image: Optional[list[int]] = None

    def __init__(
        self, module: nn.Module, function: Callable[..., Any], bound: BoundArguments
    ) -> None:
        self.module, self.function, self.bound = module, function, bound
        self.device = device_of(bound.arguments)

    def __call__(self) -> Any:
        return self.function(*self.bound.args, **self.bound.kwargs)

    def changed(self, **arguments: Any) -> BoundArguments:
        """The arguments, with others in place of some."""
        all_arguments = OrderedDict({**self.bound.arguments, **arguments})
        return BoundArguments(self.bound.signature, all_arguments)

    def restricted_to(self, chosen: Sequence[slice]) -> "_Call":
        """The call with only some objects, or pairs, of each image."""
        raise NotImplementedError

    def run(self, chunk_size: int) -> tuple[Any, list[Any]]:
        """Compute the result in chunks.

        Args:
            chunk_size: objects, or pairs, of a chunk.

        Returns:
            The result; and the numbers on which it depends.
        """
        raise NotImplementedError


class _MatcherCall(_Call):
    """A call of a Hungarian matcher, which gives costs, queries x objects, to SciPy.

    Args:
        solver: what the matcher calls by this name.
    """

    def __init__(self, solver: "_Solver", *args: Any) -> None:
        super().__init__(*args)
        self._solver = solver
        self._targets = {n: v for n, v in self.bound.arguments.items() if is_targets(v)}
        counts = [objects_per_image(targets) for targets in self._targets.values()]
        if counts and all(count == counts[0] for count in counts):
            self.num_per_image = counts[0]

    def restricted_to(self, chosen: Sequence[slice]) -> _Call:
        bound = self.changed(**{n: take_objects(v, chosen) for n, v in self._targets.items()})
        return _MatcherCall(self._solver, self.module, self.function, bound)

    def run(self, chunk_size: int) -> tuple[Any, list[_Matrix]]:
        assert self.num_per_image is not None
        state = RandomState(self.device)
        chunks = list(chunks_of(self.num_per_image, chunk_size))
        with self._solver.gathering(len(chunks)) as columns:
            for chunk in chunks:
                state.restore()  # all chunks compare masks at the same points
                columns.append([])
                result = self.restricted_to(chunk)()
        num_pairs = np.array([len(queries) for queries, _ in result])
        return result, [*map(_joined, zip(*columns)), num_pairs]


class _Solver:
    """SciPy's ``linear_sum_assignment``, except while columns of matrices are gathered.

    Attributes:
        columns: for each chunk, the parts of all matrices, in the order in which the matcher uses
            them.
    """

    def __init__(self) -> None:
        self.columns: list[list[_Matrix]] = []
        self._num_chunks = 0

    @contextmanager
    def gathering(self, num_chunks: int) -> Iterator[list[list[_Matrix]]]:
        """While open, matrices are complete in the last chunk; in the others nothing is matched."""
        self._num_chunks, self.columns = num_chunks, []
        try:
            yield self.columns
        finally:
            self._num_chunks, self.columns = 0, []

    def instead_of(self, solve: _Solve) -> _Solve:
        def linear_sum_assignment(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
            if self._num_chunks:
                self.columns[-1].append(np.array(cost_matrix))
                if len(self.columns) < self._num_chunks:
                    return 2 * (np.arange(min(cost_matrix.shape)),)
                position = len(self.columns[-1]) - 1
                cost_matrix = _joined([parts[position] for parts in self.columns])
            return solve(cost_matrix, *args, **kwargs)

        return linear_sum_assignment


def _joined(columns: Sequence[_Matrix]) -> _Matrix:
    return np.concatenate(columns, axis=1)


class _LossCall(_Call):
    """A criterion's loss of predictions, targets, and ``indices``: of queries and their objects."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        names = list(self.bound.signature.parameters)
        self._name = names[names.index("indices") - 1]
        arguments: Any = self.bound.arguments  # of any values
        self._targets, self._indices = arguments[self._name], arguments.get("indices")
        objects = objects_per_image(self._targets) if is_targets(self._targets) else None
        if objects and _are_pairs(self._indices):
            self.num_per_image = [len(queries) for queries, _ in self._indices]

    def restricted_to(self, chosen: Sequence[slice]) -> _Call:
        pairs = [(q[part], o[part]) for (q, o), part in zip(self._indices, chosen)]
        targets = take_objects(self._targets, [objects for _, objects in pairs])
        indices = [(q, torch.arange(len(o), device=o.device)) for q, o in pairs]
        bound = self.changed(**{self._name: targets, "indices": indices})
        return _LossCall(self.module, self.function, bound)

    def run(self, chunk_size: int) -> tuple[Any, list[torch.Tensor]]:
        assert self.num_per_image is not None
        recompute = partial(recompute_in_backward, self.module)
        has_masks = "mask" in self.function.__name__  # of full size, or else it is left alone
        results = []
        for chunk in chunks_of(self.num_per_image, chunk_size):
            run = partial(self._run_chunk, chunk)
            # Mask2Former's losses are TorchScript, which cannot be stopped half-way.
            with set_checkpoint_early_stop(False):
                arguments = self.bound.arguments.values()
                results.append(recompute(run, *arguments) if has_masks else run())
        total = _sum(results)
        return total, [torch.as_tensor(value).detach() for value in tree_iter(total)]

    def _run_chunk(self, chunk: Sequence[slice], *_: Any) -> Any:
        return self.restricted_to(chunk)()


def _are_pairs(indices: Any) -> bool:
    return isinstance(indices, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and torch.is_tensor(pair[0])
        for pair in indices
    )


def _sum(results: Sequence[Any]) -> Any:
    if isinstance(results[0], dict):
        return {name: sum(result[name] for result in results) for name in results[0]}
    return sum(results)
