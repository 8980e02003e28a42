# Copyright (c) the d2_memfit developers.
"""Losses of well-known criteria that are means over elements of the batch, and their numbers."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Optional

from detectron2.utils.events import get_event_storage
from torch import nn

# Criteria by the name of their class: the method whose losses are means over elements of the batch;
# their number, from the module and the method's arguments; the losses, if not all; and whether
# only MEMFIT.NORMALIZERS.POLICY exact counts them, because images are nearly the right weights.
_MEANS: dict[str, tuple[str, Optional[Callable[..., Any]], tuple[str, ...], bool]] = {
    # DiffusionDet and SparseInst: get_loss(loss, outputs, targets, indices, ...)
    "SetCriterionDynamicK": ("get_loss", lambda m, *a: sum(len(t) for _, t in a[3]), (), False),
    "SparseInstCriterion": (
        *("get_loss", lambda m, *a: sum(len(t) for _, t in a[3])),
        *(("loss_mask", "loss_objectness"), False),
    ),
    # CondInst and BoxInst: __call__(features, stride, instances, ...)
    "DynamicMaskHead": ("__call__", lambda m, *a: len(a[2]), ("loss_mask", "loss_prj"), False),
    # Detectron2: losses(predictions, proposals), forward(features, proposals), losses(logits, ...)
    "FastRCNNOutputLayers": ("losses", lambda m, *a: sum(map(len, a[1])), (), True),
    "BaseMaskRCNNHead": ("forward", lambda m, *a: sum(map(len, a[1])), (), True),
    "BaseKeypointRCNNHead": ("forward", lambda m, *a: 1, (), True),  # nearly, even then
    "SemSegFPNHead": ("losses", lambda m, *a: (a[1] != m.ignore_value).sum(), (), True),
    # RetinaNet and FCOS: no mean, but a running mean
    "DenseDetector": ("_ema_update", None, (), False),
}


def answered_means(model: nn.Module, is_exact: bool, current: Any) -> list[tuple[type, str, Any]]:
    """Methods by which the known criteria of a model ask for the window's counts: class, name, new.

    Args:
        is_exact: whether to include those that cost one more forward of all images.
        current: gives the ``Answers`` of the forward that runs.
    """
    found: list[tuple[type, str, Any]] = []
    for cls in {type(module) for module in model.modules()}:
        names = {base.__name__ for base in cls.__mro__} & _MEANS.keys()
        for name in (n for n in names if hasattr(cls, _MEANS[n][0])):  # else it is a namesake
            method, number, losses, is_near = _MEANS[name]
            original, is_counted = getattr(cls, method), is_exact or not is_near
            made = _running(original, current)
            if number is not None:
                made = _mean(original, current, number, losses, is_counted)
            found.append((cls, method, made))
    return found


def _mean(
    original: Callable[..., Any],
    current: Callable[[], Any],
    number: Callable[..., Any],
    losses: Sequence[str],
    is_counted: bool,
) -> Callable[..., Any]:
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(module, *args, **kwargs)
        if not (module.training and isinstance(result, dict)):  # a project's may return more
            return result
        if not is_counted:
            current().nearly.update(result)
            return result
        bound = inspect.signature(original).bind(module, *args, **kwargs).args
        factor = current().factor(number(*bound), 1.0)
        return {k: v * factor if k in (losses or result) else v for k, v in result.items()}

    return method


def _running(original: Callable[..., float], current: Callable[[], Any]) -> Callable[..., float]:
    """For RetinaNet and FCOS: a running mean of the positive anchors in a batch.

    It changes once per window. The window's number is estimated from the micro-batches so far: the
    exact one would take another forward of all images.
    """

    def update(
        module: nn.Module, name: str, value: float, initial_value: float, momentum: float = 0.9
    ) -> float:
        share = current().own_share
        if share == 1:
            return original(module, name, value, initial_value, momentum)
        state, iteration = vars(module), get_event_storage().iter  # a retry puts attributes back
        of, before, total, shares = state.get(f"{name}_of_window", (None, 0.0, 0.0, 1.0))
        if of != iteration or shares > 1 - 1e-6:
            before, total, shares = state.get(name, initial_value), 0.0, 0.0
        total, shares = total + value, shares + share
        state[f"{name}_of_window"] = iteration, before, total, shares
        state[name] = before * momentum + total / shares * (1 - momentum)
        return float(state[name] * share)

    return update
