# Copyright (c) the d2_memfit developers.
"""COCO's averages, computed from evaluations of parts of a dataset."""

import io
from collections import defaultdict
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools.cocoeval import COCOeval, Params

__all__ = ["CocoMatches"]

_NO_LIMIT = 10**9


class _OfCategory(NamedTuple):
    """Detections [N] of one category: scores, and ranks by score in each image."""

    scores: NDArray[np.float64]
    ranks: NDArray[np.int32]


class _OfArea(NamedTuple):
    """The matches of these detections in one range of areas.

    ``matched`` and ``ignored`` have one bit per threshold, [bytes, N]. ``annotated_ignored`` says
    which annotated objects are ignored.
    """

    matched: NDArray[np.uint8]
    ignored: NDArray[np.uint8]
    annotated_ignored: NDArray[np.bool_]


class CocoMatches:
    """Collects ``evalImgs`` of ``COCOeval.evaluate``, and accumulates them over all images.

    It keeps about 30 bytes per detection. The result equals that of ``COCOeval.accumulate``.
    """

    def __init__(self) -> None:
        self._of_category: dict[int, list[_OfCategory]] = defaultdict(list)
        self._of_area: dict[tuple[int, int], list[_OfArea]] = defaultdict(list)

    def add(self, part: COCOeval) -> None:
        """Add the images of the next part."""
        p = part.params
        for k in range(len(p.catIds)):
            for a in range(len(p.areaRng)):
                begin = (k * len(p.areaRng) + a) * len(p.imgIds)
                images = [e for e in part.evalImgs[begin : begin + len(p.imgIds)] if e is not None]
                if not images:
                    continue
                if a == 0:
                    scores = np.concatenate([e["dtScores"] for e in images]).astype(np.float64)
                    ranks = np.concatenate([np.arange(len(e["dtScores"])) for e in images])
                    self._of_category[k].append(_OfCategory(scores, ranks.astype(np.int32)))
                matched = np.concatenate([e["dtMatches"] != 0 for e in images], axis=1)
                ignored = np.concatenate([e["dtIgnore"] != 0 for e in images], axis=1)
                annotated = np.concatenate([e["gtIgnore"] != 0 for e in images])
                packed = np.packbits(matched, axis=0), np.packbits(ignored, axis=0)
                self._of_area[k, a].append(_OfArea(*packed, annotated))

    def accumulated(self, p: Params) -> dict[str, Any]:
        """Compute ``COCOeval.eval`` of all images.

        Args:
            p: parameters of any part.
        """
        shape = len(p.iouThrs), len(p.recThrs), len(p.catIds), len(p.areaRng), len(p.maxDets)
        precision = -np.ones(shape)
        scores = -np.ones(shape)
        recall = -np.ones((shape[0], *shape[2:]))
        for k, of_images in self._of_category.items():
            found = _OfCategory(*map(np.concatenate, zip(*of_images)))
            for m, max_dets in enumerate(p.maxDets):
                order = np.flatnonzero(found.ranks < max_dets)
                # A stable sort, as in pycocotools.
                order = order[np.argsort(-found.scores[order], kind="mergesort")]
                for a in range(len(p.areaRng)):
                    of_area = self._of_area[k, a]
                    matched = np.concatenate([part.matched for part in of_area], axis=1)[:, order]
                    ignored = np.concatenate([part.ignored for part in of_area], axis=1)[:, order]
                    annotated = np.concatenate([part.annotated_ignored for part in of_area])
                    for t in range(len(p.iouThrs)):
                        one = _accumulated(
                            p, found.scores[order], _bits(matched, t), _bits(ignored, t), annotated
                        )
                        precision[t, :, k, a, m] = one["precision"][0, :, 0, 0, 0]
                        scores[t, :, k, a, m] = one["scores"][0, :, 0, 0, 0]
                        recall[t, k, a, m] = one["recall"][0, 0, 0, 0]
        return {
            "params": p,
            "counts": list(shape),
            "precision": precision,
            "recall": recall,
            "scores": scores,
        }


def _bits(packed: NDArray[np.uint8], t: int) -> NDArray[np.bool_]:
    bits: NDArray[np.bool_] = ((packed[t // 8] >> (7 - t % 8)) & 1).astype(bool)
    return bits[None]


def _accumulated(
    p: Params,
    scores: NDArray[np.float64],
    matched: NDArray[np.bool_],
    ignored: NDArray[np.bool_],
    annotated_ignored: NDArray[np.bool_],
) -> dict[str, Any]:
    """Accumulate with pycocotools as if all detections were in one image.

    This is for one threshold, category, range of areas and number of detections.
    """
    single = COCOeval(iouType=p.iouType)
    single.params.imgIds = [0]
    single.params.catIds = [0]
    single.params.areaRng = p.areaRng[:1]
    single.params.maxDets = [_NO_LIMIT]
    single.params.iouThrs = p.iouThrs[:1]
    single.params.recThrs = p.recThrs
    single._paramsEval = single.params
    image = {"dtScores": scores, "dtMatches": matched, "dtIgnore": ignored}
    single.evalImgs = [{**image, "gtIgnore": annotated_ignored}]
    with redirect_stdout(io.StringIO()):
        single.accumulate()
    evaluated: dict[str, Any] = single.eval
    return evaluated
