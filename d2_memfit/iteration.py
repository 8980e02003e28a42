# Copyright (c) the d2_memfit developers.
"""The distribution of an iteration's images over ranks, batches and micro-batches."""

from dataclasses import dataclass
from typing import Optional

from detectron2.config import CfgNode

__all__ = ["BatchGeometry"]


@dataclass(frozen=True)
class BatchGeometry:
    """Numbers of images in one iteration.

    Attributes:
        ranks: processes that train together.
        images_per_batch: images in a batch of one rank's loader, SOLVER.IMS_PER_BATCH / ranks.
        accumulation_steps: batches of the loader per optimizer step.
        micro_batch_size: images in one forward on each rank; None for the loader's batch.
    """

    ranks: int
    images_per_batch: int
    accumulation_steps: int = 1
    micro_batch_size: Optional[int] = None

    @classmethod
    def from_cfg(cls, cfg: CfgNode, ranks: int) -> "BatchGeometry":
        return cls(
            ranks,
            cfg.SOLVER.IMS_PER_BATCH // ranks,
            cfg.SOLVER.ACCUMULATION_STEPS,
            cfg.MEMFIT.MICRO_BATCH,
        )

    @property
    def window(self) -> int:
        """Images of one rank per optimizer step."""
        return self.images_per_batch * self.accumulation_steps

    @property
    def largest_micro_batch(self) -> int:
        return min(self.micro_batch_size or self.images_per_batch, self.window)

    def micro_batch_sizes(self) -> list[int]:
        """Number of images of each forward of an iteration, on each rank."""
        if self.micro_batch_size is None:
            return [self.images_per_batch] * self.accumulation_steps
        full, rest = divmod(self.window, self.micro_batch_size)
        return [self.micro_batch_size] * full + [rest] * (rest > 0)

    @property
    def crosses_batches(self) -> bool:
        """Whether a micro-batch can mix images of several of the loader's batches."""
        size = self.micro_batch_size or self.images_per_batch
        return self.accumulation_steps > 1 and self.images_per_batch % size > 0
