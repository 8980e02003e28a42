# Copyright (c) the d2_memfit developers.
"""Images with many objects: matching of anchors in chunks, and a limit of denoising queries."""

import logging
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from inspect import signature
from typing import Any, Optional

import torch
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes
from detectron2.utils.logger import log_first_n
from torch import nn

from ..common.errors import ConfigError
from ..common.patching import replaced_functions, source_files, with_original
from .technique import Technique, wrap_method

__all__ = ["ChunkedMatching", "DenoisingQueries", "pairwise_iou_in_chunks"]

# What makes denoising queries: RT-DETR and its successors in the transformers library; detrex.
_MAKERS = ("get_contrastive_denoising_training_group", "prepare_for_cdn")


class ChunkedMatching(Technique):
    """Matches anchors or proposals to instances in chunks, with Detectron2's labels.

    Saves the matrices of anchors x instances, of which Detectron2 holds about six at a time: 2 GB
    for 268,569 anchors and 300 instances. Costs up to 20% of an iteration on a CPU, and nothing
    that was measured on crowds. It applies to the proposal network, ROI heads and RetinaNet.

    Source: github.com/facebookresearch/detectron2/pull/3750, whose matcher loops over instances.

    Key: Anchors that are matched to an image's instances at a time. None: all, as in Detectron2.
    """

    key = "MEMFIT.MATCHING.CHUNK_SIZE"

    def suggest(self, job: Any, model: nn.Module) -> Optional[int]:
        return 4096 if _matching_modules(model) else None

    def apply(self, model: nn.Module, chunk_size: int) -> nn.Module:
        modules = _matching_modules(model)
        if not modules:
            raise ConfigError(
                f"{self.key}: the model has no Matcher of Detectron2, so nothing would change. Set "
                "it None"
            )
        for module in modules:
            wrap_method(module, "forward", _forward_in_chunks, chunk_size)
        return model


def _matching_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _kinds_of_matchers(module) == {Matcher}]


def _kinds_of_matchers(module: nn.Module) -> set[type]:
    """Classes of a module's matchers; Cascade R-CNN has a list. A subclass may use the matrix."""
    values = (v if isinstance(v, list) else [v] for v in vars(module).values())
    return {type(m) for matchers in values for m in matchers if isinstance(m, Matcher)}


def _forward_in_chunks(
    module: nn.Module, forward: Callable[..., Any], chunk_size: int, *args: Any, **kwargs: Any
) -> Any:
    # Code of projects may do anything with a matrix; that of Detectron2 is known.
    files = [f for f in source_files([module]) if f.__name__.startswith("detectron2.")]
    replacement = {"pairwise_iou": partial(pairwise_iou_in_chunks, chunk_size)}
    with replaced_functions((files, replacement)):
        return forward(*args, **kwargs)


def pairwise_iou_in_chunks(chunk_size: int, pairwise_iou: Callable[..., torch.Tensor]) -> Any:
    """A replacement of ``pairwise_iou`` whose results a ``Matcher`` reads in chunks."""

    def iou(instances: Boxes, anchors: Boxes) -> Any:
        if not len(instances) or len(anchors) <= chunk_size:
            return pairwise_iou(instances, anchors)
        return _PairwiseIou(pairwise_iou, instances, anchors, chunk_size)

    return iou


class _PairwiseIou:
    """The matrix of overlaps [instances, anchors] for a ``Matcher``: columns are made in chunks.

    Everything else than what the matcher does gets the whole matrix.
    """

    def __init__(
        self, pairwise_iou: Callable[..., torch.Tensor], instances: Boxes, anchors: Boxes, step: int
    ) -> None:
        self.shape = torch.Size([len(instances), len(anchors)])
        self._boxes = instances, anchors
        self._make, self._step = pairwise_iou, step

    def _chunks(self) -> Iterator[torch.Tensor]:
        instances, anchors = self._boxes
        for start in range(0, len(anchors), self._step):
            yield self._make(instances, anchors[start : start + self._step])

    def dim(self) -> int:
        return 2

    def numel(self) -> int:
        return self.shape.numel()

    @cached_property
    def _best(self) -> tuple[torch.Tensor, ...]:
        """Lowest value; of each anchor, the best value and its instance; best of each instance."""
        worst, of_anchors, of_instances = [], [], []
        for chunk in self._chunks():
            worst.append(chunk.min())
            of_anchors.append(chunk.max(dim=0))
            of_instances.append(chunk.max(dim=1).values)
        values, instances = (torch.cat(found) for found in zip(*of_anchors))
        return (
            torch.stack(worst).min(),
            values,
            instances,
            torch.stack(of_instances).max(dim=0).values,
        )

    def __ge__(self, least: Any) -> torch.Tensor:
        return self._best[0] >= least

    def max(self, dim: int) -> tuple[torch.Tensor, Any]:
        """As ``Tensor.max``, without the anchors of dim 1, which a matcher does not use."""
        _, values, instances, of_instances = self._best
        return (of_instances, None) if dim else (values, instances)

    def __eq__(self, values: Any) -> Any:
        """Whether an instance has its value [instances, 1] in a column [1, anchors]."""
        return torch.cat([(chunk == values).any(dim=0) for chunk in self._chunks()])[None]

    __hash__: Any = None

    def __getattr__(self, name: str) -> Any:
        if not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        text = f"{ChunkedMatching.key}: a project's code makes the whole matrix of pairs"
        log_first_n(logging.WARNING, text, key="message")
        return getattr(torch.cat(list(self._chunks()), dim=1), name)


class DenoisingQueries(Technique):
    """Leaves denoising queries out of forwards with crowded images, in DINO-like models.

    Saves the decoder's memory for two queries of each object, and the attention among them: they
    follow the most crowded image. All objects are matched, as before.

    Source: Zhang et al., "DINO", arXiv:2203.03605, whose queries are for all objects.

    Key: A forward with an image of more objects has no denoising queries. None: as in the project.
    """

    tier, key = "recipe", "MEMFIT.CRITERION.DENOISING_QUERIES"
    changes = "a forward with an image of more objects has no denoising queries"

    def suggest(self, job: Any, model: nn.Module) -> Optional[int]:
        return 100 if _makers(model) else None

    def apply(self, model: nn.Module, limit: int) -> nn.Module:
        if not _makers(model):
            raise ConfigError(
                f"{self.key}: no class of the model calls {' or '.join(_MAKERS)}, so nothing would "
                "change. Set it None"
            )
        wrap_method(model, "forward", _forward_with_limit, limit)
        return model


def _makers(model: nn.Module) -> list[tuple[list[Any], str]]:
    """The files and classes of a model that have a function that makes denoising queries."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    places = [*source_files(model.modules()), *(k for k in kinds if issubclass(k, nn.Module))]
    known = [([p for p in places if name in vars(p)], name) for name in _MAKERS]
    return [(found, name) for found, name in known if found]


def _forward_with_limit(
    model: nn.Module, forward: Callable[..., Any], limit: int, *args: Any, **kwargs: Any
) -> Any:
    limited = with_original(partial(_none_for_crowds, limit))
    with replaced_functions(*((found, {name: limited}) for found, name in _makers(model))):
        return forward(*args, **kwargs)


def _none_for_crowds(limit: int, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    targets = signature(make).bind(*args, **kwargs).arguments["targets"] or ()
    most = max((len(t.get("class_labels", t.get("labels", ()))) for t in targets), default=0)
    if most <= limit:
        return make(*args, **kwargs)
    text = f"{DenoisingQueries.key} {limit}: an image has {most} objects, so this forward, and "
    text += "others like it, have no denoising queries. This is said once"
    log_first_n(logging.WARNING, text, key="caller")
    return None, None, None, None  # queries of classes and boxes, attention mask, and facts
