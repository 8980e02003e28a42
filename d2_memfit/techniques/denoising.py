# Copyright (c) the d2_memfit developers.
"""Denoising queries of DINO-like models, for a bounded number of objects."""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from torch import nn

from ..common.patching import Groups, calls_function, files_of_classes
from ..errors import ConfigError
from .registry import TECHNIQUES, PositiveIntTechnique
from .support import (
    ReplacesInForward,
    add_mixin,
    classes_of_criteria,
    objects_per_image,
    take_objects,
)

__all__ = ["DenoisingQueries"]

logger = logging.getLogger(__name__)

# What makes the queries, and what pairs them with their objects for the losses.
_MAKES = "get_contrastive_denoising_training_group"  # RT-DETR and its successors
_PAIRS = "get_cdn_matched_indices"
_MAKES_OF_DINO = "prepare_for_cdn"  # detrex
_LOSSES_OF_DINO = "compute_dn_loss"
_CHOSEN = "memfit_chosen"  # key of the dict that the former give to the latter
_NUMBERS = ("num_denoising", "num_denoising_queries", "dn_number")  # arguments of the former
_OWN = re.compile(r"(^|_)c?dn(_|$)|denois")  # names of other projects' functions
_MEANS = ("loss_ddf",)  # of D-FINE: not divided by the number of objects

_Chosen = Sequence[torch.Tensor]  # numbers of the chosen objects of each image


@TECHNIQUES.register()
class DenoisingQueries(PositiveIntTechnique):
    """Bounds the denoising queries of DINO-like models, which follow the most crowded image.

    Saves the decoder's memory for two queries of each further object, and the attention among them.

    Source: Zhang et al., "DINO", arXiv:2203.03605, whose queries are for all objects.
    """

    tier = "recipe"
    changes = (
        "in each forward, an image with more objects has denoising queries for a random choice of "
        "them. Their losses are weighted to count for all of its objects. The queries of a group "
        "see each other, so their predictions differ a little. All objects are matched, as before"
    )
    part = "model"
    # Objects of an image that have denoising queries at a time, each of them counted once in
    # each group, as in num_denoising of transformers. If an image has more objects, a random
    # choice of them has queries in each forward. None: all, as in the project.
    key = "MEMFIT.CRITERION.DENOISING_QUERIES"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        kind = cfg.get("TRANSFORMERS", {}).get("TYPE")
        return {cls.key: 100} if kind in ("rt_detr_v2", "d_fine") else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        classes = classes_of_criteria(model)
        problem = _problem(model, classes)
        if problem is not None:
            raise ConfigError(f"{cls.key}: {problem}. Set it None")
        limit = cfg.MEMFIT.CRITERION.DENOISING_QUERIES
        logger.info(
            "%s %d: if an image has more objects, a random choice of them has denoising queries in "
            "each forward, with weighted losses. All objects are matched",
            *(cls.key, limit),
        )
        of_mixin = {"denoising_limit": limit, "denoising_classes": classes, "denoising_said": []}
        add_mixin(model, _BoundsQueries, **of_mixin)
        return model


def _problem(model: nn.Module, classes: Sequence[type]) -> Optional[str]:
    """Why the denoising queries of a model cannot be bounded; None if they can be."""
    functions = {(cls, name) for cls in classes for name in vars(cls)}
    is_dino = any(name == _MAKES_OF_DINO for _, name in functions)
    makers = [m for m in model.modules() if calls_function(type(m), _MAKES)]
    if not makers and not is_dino:
        kinds = (cls for module in model.modules() for cls in type(module).__mro__)
        own = (f"{c.__qualname__}.{name}" for c in kinds for name in vars(c) if _OWN.search(name))
        for name in own:
            return f"{name} makes denoising queries in its own way, which cannot be bounded"
        return "the model has no denoising queries, so nothing would change"
    if any(getattr(getattr(m, "config", None), "num_denoising", 1) == 0 for m in makers):
        return "num_denoising of the model is 0, so it has no denoising queries"
    pairs = _LOSSES_OF_DINO if is_dino else _PAIRS
    if not any(name == pairs for _, name in functions):
        name = _MAKES_OF_DINO if is_dino else _MAKES
        return f"the model calls {name}, but its criterion has no {pairs}"
    return None


class _BoundsQueries(ReplacesInForward):
    denoising_limit: int
    denoising_classes: list[type]
    denoising_said: list[str]

    def replaced(self) -> Groups:
        makes = partial(_for_chosen_objects, self.denoising_limit, self.denoising_said)
        of_classes: dict[str, Callable[[Any], Any]] = {
            _MAKES_OF_DINO: makes,
            _LOSSES_OF_DINO: _losses_of_chosen,
            _PAIRS: _pairs_of_chosen,
            "get_loss": _weighted,
        }
        callers = [cls for cls in self.denoising_classes if calls_function(cls, _MAKES)]
        groups: list[Any] = [
            ([file], {_MAKES: makes}) for file in files_of_classes(callers) if hasattr(file, _MAKES)
        ]
        for cls in self.denoising_classes:
            groups.append(([cls], {n: new for n, new in of_classes.items() if n in vars(cls)}))
        return groups


class _Weighted(list[Any]):
    """Targets, or indices, of the chosen objects.

    Attributes:
        weights: for each image, its objects divided by the chosen ones.
    """

    def __init__(self, values: Sequence[Any], weights: Sequence[float]) -> None:
        super().__init__(values)
        self.weights = weights


def _for_chosen_objects(limit: int, said: list[str], make: Callable[..., Any]) -> Any:
    """Make queries for some of the objects, and tell the criterion which."""

    @wraps(make)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature(make).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        arguments.update({n: min(arguments[n], limit) for n in _NUMBERS if n in arguments})
        counts = objects_per_image(arguments["targets"])
        assert counts is not None
        if max(counts) <= limit:
            return make(*bound.args, **bound.kwargs)
        chosen = [
            (torch.randperm(count)[:limit].sort().values if count > limit else torch.arange(count))
            for count in counts
        ]
        if not said:
            said.append(
                f"{DenoisingQueries.key}: {limit} of the {max(counts)} objects of an image have "
                "denoising queries, and the others have none in this forward"
            )
            logger.info("%s. All objects are matched. This is said once", said[0])
        arguments["targets"] = take_objects(arguments["targets"], chosen)
        *queries, meta = make(*bound.args, **bound.kwargs)
        return (*queries, {**meta, _CHOSEN: chosen})

    return run


def _of_chosen(targets: Sequence[Any], chosen: _Chosen) -> _Weighted:
    counts = objects_per_image(targets)
    assert counts is not None
    weights = [count / max(len(objects), 1) for count, objects in zip(counts, chosen)]
    return _Weighted(take_objects(targets, chosen), weights)


def _pairs_of_chosen(pair: Callable[..., Any]) -> Any:
    @wraps(pair)
    def run(meta: Any, targets: Sequence[Any]) -> Any:
        if _CHOSEN not in meta:
            return pair(meta, targets)
        subset = _of_chosen(targets, meta[_CHOSEN])
        pairs = [
            (queries, chosen.to(objects.device)[objects])
            for chosen, (queries, objects) in zip(meta[_CHOSEN], pair(meta, subset))
        ]
        return _Weighted(pairs, subset.weights)

    return staticmethod(run)


def _losses_of_chosen(losses: Callable[..., Any]) -> Any:
    @wraps(losses)
    def run(criterion: Any, meta: Any, targets: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if meta and _CHOSEN in meta:
            targets = _of_chosen(targets, meta[_CHOSEN])
        return losses(criterion, meta, targets, *args, **kwargs)

    return run


def _weighted(get_loss: Callable[..., Any]) -> Any:
    """Count the losses of each chosen object for the objects of its image that have no queries."""

    @wraps(get_loss)
    def run(criterion: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        weights = next((a.weights for a in args if isinstance(a, _Weighted)), None)
        if weights is None:
            return get_loss(criterion, loss, *args, **kwargs)
        outputs, targets, indices, num_boxes, *rest = args
        total = get_loss(
            criterion, loss, outputs, list(targets), list(indices), num_boxes, *rest, **kwargs
        )
        for i, weight in enumerate(weights):
            if weight == 1:
                continue
            image = slice(i, i + 1)
            outputs_of_image = {
                name: value[image] if _is_of_images(value, len(targets)) else value
                for name, value in outputs.items()
            }
            more = get_loss(
                *(criterion, loss, outputs_of_image, targets[image], indices[image]),
                *(num_boxes / (weight - 1), *rest),
                **kwargs,
            )
            total = {k: v if k in _MEANS else v + more[k] for k, v in total.items()}
        return total

    return run


def _is_of_images(value: Any, num_images: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == num_images
