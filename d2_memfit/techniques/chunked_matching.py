# Copyright (c) the d2_memfit developers.
"""Chunked matching of anchors to instances, without the matrix of all pairs."""

import logging
from collections.abc import Iterable
from typing import Any, Callable

import torch
from detectron2.config import CfgNode
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.structures import Boxes, Instances
from detectron2.utils.logger import log_first_n
from torch import nn

from ..common.patching import Groups, knows_function, source_files
from .adapters import ADAPTERS, Adapter, AdapterTechnique
from .registry import TECHNIQUES, PositiveIntTechnique
from .support import ReplacesInForward, own_class

__all__ = ["ChunkedMatcher", "ChunkedMatching", "PairwiseQuality"]

logger = logging.getLogger(__name__)


@TECHNIQUES.register()
class ChunkedMatching(AdapterTechnique, PositiveIntTechnique):
    """Matches anchors or proposals to instances in chunks, with Detectron2's labels.

    Saves the matrices of anchors x instances, of which Detectron2 holds about six at a time: 2 GB
    for 268,569 anchors and 300 instances. Costs nothing: small chunks stay in the processor's
    caches. It applies to the proposal network, ROI heads, RetinaNet and FCOS.

    Source: github.com/facebookresearch/detectron2/pull/3750, whose matcher loops over instances.

    Key: Anchors that are matched to an image's instances at a time. None: all, as in Detectron2.
    """

    key = "MEMFIT.MATCHING.CHUNK_SIZE"
    what = "matching of Detectron2"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.MATCHING.CHUNK_SIZE": 4096}


def _matchers_of(module: nn.Module) -> dict[str, list[Matcher]]:
    """The matchers of a module, by the names of its attributes."""
    values = {k: v if isinstance(v, list) else [v] for k, v in vars(module).items()}
    return {k: v for k, v in values.items() if v and all(isinstance(m, Matcher) for m in v)}


class PairwiseQuality:
    """A replacement of the matrix [M, N] of match qualities of M instances and N anchors.

    Args:
        compute: called as ``compute(rows, columns)`` with two tensor indices, of which the second
            is a slice; returns that part of the matrix.
        shape: (M, N).
        chunk_size: columns that are computed at a time.
    """

    def __init__(
        self, compute: Callable[..., torch.Tensor], shape: tuple[int, int], chunk_size: int
    ) -> None:
        self.compute = compute
        self.shape = shape
        self.chunks = _chunks(shape[1], chunk_size)

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quality and number of the best instance of each anchor, as ``Tensor.max`` (dim 0)."""
        assert dim == 0
        best = [self.compute(slice(None), chunk).max(dim=0) for chunk in self.chunks]
        return torch.cat([b.values for b in best]), torch.cat([b.indices for b in best])


def _chunks(num: int, chunk_size: int) -> list[slice]:
    return [slice(i, min(i + chunk_size, num)) for i in range(0, num, chunk_size)]


class ChunkedMatcher(Matcher):
    """Detectron2's ``Matcher`` for a matrix or a :class:`PairwiseQuality`.

    Args:
        matcher: the matcher whose thresholds and labels are used.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.__dict__.update(vars(matcher))

    def __call__(self, quality: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Match anchors to instances.

        Args:
            quality: a matrix [M, N], or a :class:`PairwiseQuality`.

        Returns:
            The matched instance of each anchor [N], int64, and its label [N], int8.
        """
        if not isinstance(quality, PairwiseQuality):
            log_first_n(
                logging.WARNING,
                "MEMFIT.MATCHING.CHUNK_SIZE: a project's code, or matching of rotated boxes, has "
                "made the whole matrix of pairs",
                key="message",
            )
            return super().__call__(quality)
        if 0 in quality.shape:
            return super().__call__(quality.compute(slice(None), slice(None)))
        values = []
        matches = []
        best_of_instances = []
        worst = []
        for chunk in quality.chunks:
            part = quality.compute(slice(None), chunk)
            worst.append(part.min())
            best = part.max(dim=0)
            values.append(best.values)
            matches.append(best.indices)
            if self.allow_low_quality_matches:
                best_of_instances.append(part.max(dim=1).values)
        assert torch.stack(worst).min() >= 0  # at the end: reading a value waits for the GPU
        # With one row, Detectron2's matcher labels anchors by their best match alone.
        labels_only = Matcher.__new__(Matcher)
        vars(labels_only).update(vars(self), allow_low_quality_matches=False)
        _, labels = labels_only(torch.cat(values)[None])
        if self.allow_low_quality_matches:
            _label_best_anchors(quality, torch.stack(best_of_instances), labels)
        return torch.cat(matches), labels


def _label_best_anchors(
    quality: PairwiseQuality, best_of_instances: torch.Tensor, labels: torch.Tensor
) -> None:
    """Give label 1 to each instance's best anchors, ties included.

    Args:
        best_of_instances: the best quality in each chunk [number of chunks, M].
    """
    best = best_of_instances.max(dim=0).values
    for chunk, is_here in zip(quality.chunks, (best_of_instances == best).cpu()):
        rows = is_here.nonzero()[:, 0]
        if len(rows):
            part = quality.compute(rows, chunk)
            labels[chunk][(part == best[rows, None]).any(dim=0)] = 1


@ADAPTERS.register()
class AnchorsOfMatchers(Adapter, ReplacesInForward):
    """A module that gives the overlaps of its anchors or proposals to matchers of Detectron2."""

    technique = "ChunkedMatching"
    attribute = "anchors_at_a_time"
    anchors_at_a_time: int

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        for module in model.modules():
            kinds = {type(m) for matchers in _matchers_of(module).values() for m in matchers}
            if kinds == {Matcher}:
                yield module
            elif kinds:
                logger.warning(
                    "%s: the %s matches all at once, because of its own %s",
                    *(key, own_class(module).__name__, ", ".join(k.__name__ for k in kinds)),
                )

    @classmethod
    def add_to(cls, module: nn.Module, value: Any) -> None:
        super().add_to(module, value)
        for name, matchers in _matchers_of(module).items():
            is_list = isinstance(getattr(module, name), list)  # as in Cascade R-CNN
            chunked = [ChunkedMatcher(m) for m in matchers]
            setattr(module, name, chunked if is_list else chunked[0])

    def replaced(self) -> Groups:
        # Code of projects may do anything with a matrix; that of Detectron2 is known.
        files = [f for f in source_files([self]) if f.__name__.startswith("detectron2.")]
        known = knows_function(files, "pairwise_iou")
        return [(files, {"pairwise_iou": self._without_matrix})] if known else []

    def _without_matrix(self, pairwise_iou: Callable[..., Any]) -> Callable[..., Any]:
        def quality(instances: Boxes, anchors: Boxes) -> PairwiseQuality:
            def compute(rows: Any, columns: slice) -> torch.Tensor:
                return pairwise_iou(instances[rows], anchors[columns])

            return PairwiseQuality(compute, (len(instances), len(anchors)), self.anchors_at_a_time)

        return quality


@ADAPTERS.register()
class PointsOfFCOS(Adapter, FCOS):
    """FCOS, whose own matching differs between Detectron2's releases."""

    technique = "ChunkedMatching"
    attribute = "anchors_at_a_time"
    anchors_at_a_time: int

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        return [module for module in model.modules() if isinstance(module, FCOS)]

    def _match_anchors(self, instances: Boxes, anchors: list[Boxes]) -> PairwiseQuality:
        """Main's matching: the matrix [M, N] of an image."""
        match = super()._match_anchors

        def compute(rows: Any, columns: slice) -> torch.Tensor:
            return match(instances[rows], _part_of(anchors, columns))[:, :-1]

        num_anchors = sum(len(level) for level in anchors)
        return PairwiseQuality(compute, (len(instances), num_anchors), self.anchors_at_a_time)

    def match_anchors(self, anchors: list[Boxes], instances: list[Instances]) -> list[torch.Tensor]:
        """Matching of v0.6: the matched instances [N] of each image."""
        chunks = _chunks(sum(len(level) for level in anchors), self.anchors_at_a_time)
        match = super().match_anchors
        parts = [match(_part_of(anchors, chunk), instances) for chunk in chunks]
        return [torch.cat([matches[:-1] for matches in image]) for image in zip(*parts)]


def _part_of(levels: list[Boxes], anchors: slice) -> list[Boxes]:
    """Some anchors in their levels, plus one of the last level, which FCOS needs."""
    parts = []
    start = 0
    for level in levels:
        parts.append(level[max(anchors.start - start, 0) : max(anchors.stop - start, 0)])
        start += len(level)
    parts[-1] = Boxes.cat([parts[-1], levels[-1][-1:]])
    return parts
