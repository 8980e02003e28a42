# Copyright (c) the d2_memfit developers.
"""Chunked matching of anchors to instances, without the matrix of all pairs."""

import logging
from typing import Any, Callable

import torch
from detectron2.config import CfgNode
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.fcos import FCOS
from detectron2.structures import Boxes, Instances
from detectron2.utils.logger import log_first_n
from torch import nn

from ..common.patching import Groups, knows_function, source_files
from ..errors import ConfigError
from .registry import TECHNIQUES, PositiveIntTechnique
from .support import ReplacesInForward, add_mixin

__all__ = ["ChunkedMatcher", "ChunkedMatching", "PairwiseQuality"]


@TECHNIQUES.register()
class ChunkedMatching(PositiveIntTechnique):
    """Matches anchors or proposals to instances in chunks, with Detectron2's labels.

    Saves the matrices of anchors x instances, of which Detectron2 holds about six at a time: 2 GB
    for 268,569 anchors and 300 instances. Costs nothing: small chunks stay in the processor's
    caches. It applies to the proposal network, ROI heads, RetinaNet and FCOS.

    Source: github.com/facebookresearch/detectron2/pull/3750, whose matcher loops over instances.
    """

    tier = "exact"
    part = "model"
    # Anchors that are matched to an image's instances at a time. None: all, as in Detectron2.
    key = "MEMFIT.MATCHING.CHUNK_SIZE"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.MATCHING.CHUNK_SIZE": 4096}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        chunk_size = cfg.MEMFIT.MATCHING.CHUNK_SIZE
        has_matching = False
        for module in list(model.modules()):
            if _give_chunked_matchers(module):
                has_matching = True
                if knows_function(_files_of_detectron2(module), "pairwise_iou"):
                    add_mixin(module, _MatchesInChunks, chunk_size=chunk_size)
            if isinstance(module, FCOS):
                has_matching = True
                add_mixin(module, _MatchesPointsInChunks, chunk_size=chunk_size)
        if not has_matching:
            raise ConfigError(
                "MEMFIT.MATCHING.CHUNK_SIZE: the model has no matching of Detectron2, so nothing "
                "would change. Set it None"
            )
        return model


def _files_of_detectron2(module: nn.Module) -> list[Any]:
    """A module's files from Detectron2, whose use of a matrix of pairs is known."""
    return [f for f in source_files([module]) if f.__name__.startswith("detectron2.")]


def _give_chunked_matchers(module: nn.Module) -> bool:
    """Replace a module's matchers; return whether it had any. Cascade R-CNN has a list of them."""
    found = False
    for name, value in list(vars(module).items()):
        if type(value) is Matcher:
            setattr(module, name, ChunkedMatcher(value))
        elif isinstance(value, list) and value and all(type(v) is Matcher for v in value):
            setattr(module, name, [ChunkedMatcher(v) for v in value])
        else:
            continue
        found = True
    return found


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


class _MatchesInChunks(ReplacesInForward):
    chunk_size: int

    def replaced(self) -> Groups:
        return [(_files_of_detectron2(self), {"pairwise_iou": self._without_matrix})]

    def _without_matrix(self, pairwise_iou: Callable[..., Any]) -> Callable[..., Any]:
        def quality(instances: Boxes, anchors: Boxes) -> PairwiseQuality:
            def compute(rows: Any, columns: slice) -> torch.Tensor:
                return pairwise_iou(instances[rows], anchors[columns])

            return PairwiseQuality(compute, (len(instances), len(anchors)), self.chunk_size)

        return quality


class _MatchesPointsInChunks(FCOS):
    """FCOS, whose own matching differs between Detectron2's releases."""

    chunk_size: int

    def _match_anchors(self, instances: Boxes, anchors: list[Boxes]) -> PairwiseQuality:
        """Main's matching: the matrix [M, N] of an image."""
        match = super()._match_anchors

        def compute(rows: Any, columns: slice) -> torch.Tensor:
            return match(instances[rows], _part_of(anchors, columns))[:, :-1]

        num_anchors = sum(len(level) for level in anchors)
        return PairwiseQuality(compute, (len(instances), num_anchors), self.chunk_size)

    def match_anchors(self, anchors: list[Boxes], instances: list[Instances]) -> list[torch.Tensor]:
        """Matching of v0.6: the matched instances [N] of each image."""
        chunks = _chunks(sum(len(level) for level in anchors), self.chunk_size)
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
