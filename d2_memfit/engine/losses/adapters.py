# Copyright (c) the d2_memfit developers.
"""Criteria whose counts cannot be seen from outside, by the name of their class."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from detectron2.utils.events import get_event_storage
from torch import nn

from ...counts import mean_factor, window_share
from ...techniques.support import add_mixin

__all__ = ["adapt_criteria"]


class _Means(NamedTuple):
    """Losses of a module that are means over elements of the batch, such as its objects.

    Attributes:
        method: the method that returns a dict of them.
        count: the number of elements. It gets the module and the method's arguments, in the order
            of the method's signature.
        losses: names of the losses; all if there are none.
        is_exact: whether only MEMFIT.NORMALIZERS.POLICY exact counts them.
    """

    method: str
    count: Callable[..., Any]
    losses: tuple[str, ...] = ()
    is_exact: bool = False


def _matched(criterion: nn.Module, *args: Any) -> int:
    """Matched objects of ``get_loss(loss, outputs, targets, indices, ...)``."""
    return sum(len(objects) for _, objects in args[3])


def _instances(head: nn.Module, *args: Any) -> int:
    """Instances of ``__call__(features, stride, instances, ...)``."""
    return len(args[2])


def _proposals(head: nn.Module, *args: Any) -> int:
    """Proposals of ``losses(predictions, proposals)`` and ``forward(features, proposals)``."""
    return sum(map(len, args[1]))


def _pixels(head: Any, *args: Any) -> Any:
    """Labelled pixels of ``losses(predictions, targets)``."""
    return (args[1] != head.ignore_value).sum()


_MEANS = {
    # DiffusionDet: each layer's losses are divided by its matched queries.
    "SetCriterionDynamicK": _Means("get_loss", _matched),
    "SparseInstCriterion": _Means("get_loss", _matched, ("loss_mask", "loss_objectness")),
    # CondInst and BoxInst.
    "DynamicMaskHead": _Means("__call__", _instances, ("loss_mask", "loss_prj")),
    # Images are nearly the right weights of these, and only a forward can tell the window's counts.
    "FastRCNNOutputLayers": _Means("losses", _proposals, is_exact=True),
    "BaseMaskRCNNHead": _Means("forward", _proposals, is_exact=True),
    "SemSegFPNHead": _Means("losses", _pixels, is_exact=True),
}


def adapt_criteria(model: nn.Module, is_exact: bool) -> None:
    """Make a model's known criteria ask for the window's counts.

    Args:
        is_exact: whether to include criteria that are close without, and that cost one more forward
            of all images.
    """
    adapters = {n: _mixin(means) for n, means in _MEANS.items() if is_exact or not means.is_exact}
    adapters["DenseDetector"] = _RunningNormalizer
    for module in list(model.modules()):
        names = [kind.__name__ for kind in type(module).__mro__]
        for name in adapters.keys() & names:
            if adapters[name].__name__ not in names:  # not adapted by an earlier trainer
                add_mixin(module, adapters[name])


def _mixin(means: _Means) -> type:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = getattr(super(mixin, self), means.method)
        result = original(*args, **kwargs)
        if not self.training:
            return result
        in_order = inspect.signature(original).bind(*args, **kwargs).args
        factor = mean_factor(means.count(self, *in_order))
        is_mean = {name: not means.losses or name in means.losses for name in result}
        return {k: loss * factor if is_mean[k] else loss for k, loss in result.items()}

    mixin = type(f"_Mean{means.count.__name__}", (nn.Module,), {means.method: method})
    return mixin


class _RunningNormalizer(nn.Module):
    """Detectron2's RetinaNet and FCOS: a running mean of the positive anchors in a batch.

    The mean is updated once per window. The window's number is estimated from the micro-batches so
    far, because the exact number would take another forward of all images.
    """

    def _ema_update(
        self, name: str, value: float, initial_value: float, momentum: float = 0.9
    ) -> float:
        share = window_share()
        if share == 1:
            return super()._ema_update(name, value, initial_value, momentum)  # type: ignore[misc]
        # Plain numbers of the module, so that a retry puts them back.
        state = vars(self)
        iteration = get_event_storage().iter
        is_over = state.get(f"{name}_share", 1.0) > 1 - 1e-6
        if is_over or state[f"{name}_of_window"] != iteration:
            state[f"{name}_of_window"] = iteration
            state[f"{name}_before"] = state.get(name, initial_value)
            state[f"{name}_sum"] = state[f"{name}_share"] = 0.0
        state[f"{name}_sum"] += value
        state[f"{name}_share"] += share
        estimate = state[f"{name}_sum"] / state[f"{name}_share"]
        state[name] = state[f"{name}_before"] * momentum + estimate * (1 - momentum)
        return float(state[name] * share)
