# Copyright (c) the d2_memfit developers.
"""The images of all windows of a run, in the order in which they will be loaded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import compat
from ..common.random_state import RandomState
from ..engine.resuming import ResumableBatches
from ..engine.window import count_objects
from ..errors import ConfigError
from ..iteration import BatchGeometry
from ..job import Size
from .drawn_sizes import DrawnSizes, UnknownDraws

__all__ = ["ForeseenImages"]


class ForeseenImages:
    """The order in which a loader will give images, with their sizes and numbers of objects.

    Args:
        batches: the batches of the job's training loader.
        state: random state of a worker, with which images are loaded for a comparison.
        compared: number of these images.
        bound: height and width of the largest image that the loader gives. If sizes cannot be
            drawn, this is assumed for all images.

    Attributes:
        why_bounds: why sizes cannot be drawn; "" if they can.

    Raises:
        ConfigError: the loader gives more objects than there are annotations.
    """

    def __init__(
        self, batches: ResumableBatches, state: dict[str, Any], compared: int, bound: Size
    ) -> None:
        self._batches = batches
        self._bound = bound
        self._dicts = compat.inner_dataset(batches.images)
        self._files = np.array([_shape_of(self._dicts[i]) for i in range(len(batches.images))])
        self.why_bounds = ""
        RandomState.from_state_dict(state).restore()
        indices = list(range(min(compared, len(self._files))))
        try:
            self._drawn = DrawnSizes(compat.map_of(batches.images))
            self._drawn.check(
                (self._load(i) for i in indices), (tuple(self._files[i, :2]) for i in indices)
            )
        except UnknownDraws as e:
            self.why_bounds = str(e)

    def _load(self, index: int) -> Any:
        image = self._batches.images[index]
        given, annotated = count_objects(image), self._files[index, 2]
        if given > annotated:
            raise ConfigError(
                f"the training mapper gives {given} objects for {self.name(index)}, which has "
                f"{annotated} annotations, so the numbers of objects are not known before the run"
            )
        return image

    def name(self, index: int) -> str:
        """The name of an image of the dataset."""
        d = self._dicts[index]
        return str(d.get("file_name", d.get("image_id", index)))

    def windows(
        self,
        geometry: BatchGeometry,
        rank: int,
        workers: Sequence[dict[str, Any]],
        iterations: int,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Images of the first windows of a rank.

        Args:
            workers: random state of each worker at the start.

        Returns:
            Indices in the dataset, shape ``(iterations, images)``; and heights, widths and numbers
            of objects, shape ``(iterations, images, 3)``.
        """
        images = iterations * geometry.window
        group = self._batches.group_size
        # Wide and high images may each leave a group incomplete.
        loaded = images + 2 * (group - 1) if group else images // geometry.images_per_batch
        indices = self._batches.first_indices(rank, geometry.ranks, loaded).numpy()
        shapes = self._files[indices]
        if self.why_bounds:
            shapes[..., :2] = self._bound
        else:
            for worker, state in enumerate(workers):
                RandomState.from_state_dict(state).restore()
                of_worker = np.s_[worker :: len(workers)]
                files = self._files[indices[of_worker].ravel(), :2].tolist()
                sizes = np.array([self._drawn.draw(size) for size in files])
                shapes[of_worker][..., :2] = sizes.reshape(*indices[of_worker].shape, 2)
        indices, shapes = indices.ravel(), shapes.reshape(-1, 3)
        if group:
            height, width = self._files[indices, :2].T
            order = _grouped(width > height, group)[:images]
            indices, shapes = indices[order], shapes[order]
        shape = iterations, geometry.window
        return indices.reshape(shape), shapes.reshape(*shape, 3)


def _shape_of(d: dict[str, Any]) -> tuple[int, int, int]:
    """Height, width and number of objects of a dataset dict."""
    if "height" not in d or "width" not in d:
        name = d.get("file_name", d.get("image_id"))
        raise ConfigError(
            f"the dataset dict of {name} has no height and width, so its size is not known before "
            "the run. Add them to the dataset"
        )
    objects = [a for a in d.get("annotations", ()) if not a.get("iscrowd", 0)]
    return d["height"], d["width"], len(objects)


def _grouped(is_wide: NDArray[Any], size: int) -> NDArray[Any]:
    """Places of images, in the order of the groups that they fill, as in Detectron2.

    Args:
        is_wide: the group of each image.
    """
    groups = []
    for kind in (True, False):
        places = np.flatnonzero(is_wide == kind)
        groups.append(places[: len(places) // size * size].reshape(-1, size))
    groups = np.concatenate(groups)
    return groups[groups[:, -1].argsort()].ravel()
