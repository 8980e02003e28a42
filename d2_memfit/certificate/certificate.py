# Copyright (c) the d2_memfit developers.
"""The certificate of a run: the predicted memory of each window, and the order of the data."""

import os
from dataclasses import dataclass
from os import PathLike
from typing import Any, Optional, Union

import torch

from ..common.files import output_file
from ..common.reading import checked, load_fields, verify_checksums
from ..common.units import GB
from ..errors import ConfigError, printable

__all__ = ["Certificate"]

_BINS = 10
_NARROWEST_GB = 0.02
_WIDTH = 40  # of the longest bar
_NAMES = 4  # names of images that are shown


@dataclass(frozen=True)
class Certificate:
    """The predicted memory of all windows of a run.

    Attributes:
        needs_bytes: bytes that the process needs for the largest micro-batch of each window, int64,
            shape ``(iterations, ranks)``.
        limit_bytes: bytes that a micro-batch of several images may need.
        budget_gb: MEMFIT.BUDGET_GB.
        least_budget_gb: the smallest budget in which each image fits alone.
        images: images of an iteration, on all ranks.
        compared: number of images whose sizes were compared with those from the loader.
        why_bounds: why the largest possible size is assumed for each image; "" if sizes are drawn.
        hours: range of the predicted hours; None if they are not known.
        worst: the windows that need most, in descending order: iteration, rank, and names of the
            images of the largest micro-batch.
        sums: MEMFIT.COST_MODEL.BYTES.
        stream, states: the order of the data and the random states of all ranks, for
            ``ResumableBatches.load_state_dict``.
    """

    needs_bytes: torch.Tensor
    limit_bytes: int
    budget_gb: float
    least_budget_gb: float
    images: int
    compared: int
    why_bounds: str
    hours: Optional[tuple[float, float]]
    worst: list[tuple[int, int, list[str]]]
    sums: list[list[float]]
    stream: dict[str, Any]
    states: list[dict[str, Any]]

    @property
    def too_large(self) -> int:
        """Number of windows with an image that is predicted not to fit."""
        return int((self.needs_bytes > self.limit_bytes).any(dim=1).sum())

    def write(self, file: Union[str, "PathLike[str]"]) -> None:
        with output_file(file) as f:
            torch.save(vars(self), f)

    @classmethod
    def read(cls, file: Union[str, "PathLike[str]"]) -> "Certificate":
        """Read a file of ``d2-memfit certify``.

        Raises:
            ConfigError: it is another file.
            DataError: it is damaged.
        """
        where = f"--certificate {checked(file, '--certificate ')}"
        try:
            verify_checksums(file)
            values = torch.load(file, weights_only=True)
        except Exception as e:  # another kind of file can raise any error
            raise ConfigError(
                f"{where} is not a file of d2-memfit certify, or damaged ({type(e).__name__})"
            ) from e
        return load_fields(cls, values, where)

    def answer(self) -> str:
        """Whether all windows fit, with the largest need; and the smallest budget."""
        iterations, ranks = self.needs_bytes.shape
        most, limit = int(self.needs_bytes.max()) / GB, self.limit_bytes / GB
        runs = f"{iterations:,} windows of {self.images} images on {ranks} GPU{'s' * (ranks > 1)}"
        verdict = f"Fits: none of {runs} needs more than {most:.2f} of {limit:.2f} GB"
        if self.too_large:
            verdict = (
                f"Does not fit: {self.too_large:,} of {runs} have an image that needs up to "
                f"{most:.2f} GB, more than {limit:.2f} GB"
            )
        lines = [
            verdict,
            f"That is what a budget of {self.budget_gb:.2f} GB leaves. The smallest budget in "
            f"which each image fits is {self.least_budget_gb:.2f} GB",
        ]
        if self.hours is not None:
            low, high = self.hours
            lines.append(f"Predicted time, without evaluations: {low:.3g} to {high:.3g} h")
        return "\n".join(lines)

    def __str__(self) -> str:
        ranks = self.needs_bytes.shape[1]
        how = f"the largest possible, because {self.why_bounds}"
        if not self.why_bounds:
            how = f"as they will be drawn ({self.compared} were loaded and compared)"
        lines = [f"Sizes of images: {how}"]
        lines += ["", "Windows by memory:", *self._histogram(), "", "Windows that need most:"]
        for iteration, rank, images in self.worst:
            gb = int(self.needs_bytes[iteration, rank]) / GB
            where = f"iteration {iteration:,}" + f", rank {rank}" * (ranks > 1)
            names = [printable(os.path.basename(name)) for name in images[:_NAMES]]
            others = len(images) - _NAMES
            names += [f"{others} others"] if others > 0 else []
            lines.append(f"  {gb:.2f} GB  {where}: {', '.join(names)}")
        return "\n".join(lines)

    def _histogram(self) -> list[str]:
        gb = self.needs_bytes.flatten() / GB
        low, high = float(gb.min()), float(gb.max())
        bins = min(_BINS, 1 + int((high - low) / _NARROWEST_GB))
        edges = torch.linspace(low, max(high, low + _NARROWEST_GB), bins + 1)
        counts, _ = torch.histogram(gb, edges)
        most = float(counts.max())
        return [
            f"  {low:.2f} to {high:.2f} GB {int(n):>11,}  {'#' * round(_WIDTH * float(n) / most)}"
            for low, high, n in zip(edges[:-1], edges[1:], counts)
        ]
