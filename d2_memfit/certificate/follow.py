# Copyright (c) the d2_memfit developers.
"""Training with a certificate."""

import logging
from os import PathLike
from typing import Any, Union

from detectron2.engine import HookBase
from detectron2.utils import comm

from .. import compat
from ..common.units import GB
from ..engine.resuming import ResumableBatches
from ..engine.window import ByteCutter
from ..errors import ConfigError
from .certificate import Certificate

__all__ = ["follow"]

logger = logging.getLogger(__name__)


def follow(trainer: Any, file: Union[str, "PathLike[str]"], start_iter: int = 0) -> None:
    """Load data in the order of a certificate, and log where the run deviates from it.

    Call it on all ranks, after the weights are loaded and before ``trainer.train``.

    Args:
        trainer: a :class:`~d2_memfit.MemfitTrainer`, or an ``AccumulatingTrainer``.
        file: the file that ``d2-memfit certify`` wrote.
        start_iter: iterations that a resumed run has done with this certificate.

    Raises:
        ConfigError: the file is not a certificate, or it belongs to another job.
    """
    certificate = Certificate.read(file)
    inner = compat.inner_trainer(trainer)
    _check(certificate, inner, f"--certificate {file}", start_iter)
    trainer.register_hooks([_Follow(certificate, inner)])


def _check(certificate: Certificate, inner: Any, name: str, start_iter: int) -> None:
    batches = inner.run_state.batches
    ranks = certificate.needs_bytes.shape[-1]
    if ranks != comm.get_world_size():
        raise ConfigError(
            f"{name} is for {ranks} ranks, but this run has {comm.get_world_size()}: run "
            "d2-memfit certify --num-gpus with that number"
        )
    sums, limit_bytes = None, None
    if isinstance(inner.cutter, ByteCutter):
        cost_model = inner.cutter.cost_model
        sums, limit_bytes = [list(numbers) for numbers in cost_model.sums], cost_model.limit_bytes
    if (sums, limit_bytes) != (certificate.sums, certificate.limit_bytes):
        raise ConfigError(
            f"{name} is for another budget or MEMFIT.COST_MODEL than this run has: run "
            "d2-memfit certify with its config"
        )
    is_same = False
    if isinstance(batches, ResumableBatches) and start_iter == 0:
        try:
            is_same = batches.load_state_dict(certificate.stream, certificate.states)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
            raise ConfigError(f"{name} is for another dataset, or damaged: {e!r}") from e
    elif isinstance(batches, ResumableBatches):
        stream = batches.stream()
        is_same = all(stream[key] == certificate.stream[key] for key in ("layout", "sampler"))
    if not is_same:
        raise ConfigError(
            f"{name} is for a loader with other numbers of workers or images, or the resumed run "
            "was started without it: start a new run with a new certificate"
        )


class _Follow(HookBase):
    """Compares each window of a rank with its certificate."""

    def __init__(self, certificate: Certificate, inner: Any) -> None:
        self._inner = inner
        self._certified = certificate.needs_bytes[:, comm.get_rank()].tolist()
        self._needs: list[float] = []
        self._misses = 0
        self._errors = 0
        inner.out_of_memory_observers.append(self._note_error)

    def _note_error(self) -> None:
        self._errors += 1
        logger.warning(
            "Iteration %d: memory ran out, which the certificate does not predict",
            self._inner.iter,
        )

    def after_step(self) -> None:
        if self.trainer.iter >= len(self._certified):
            return
        needs, certified = self._inner.cutter.needs_bytes, self._certified[self.trainer.iter]
        self._needs.append(needs)
        if needs <= certified:
            return
        self._misses += 1
        if self._misses == 1:
            logger.warning(
                "Iteration %d needs %.3f GB by the sizes of its images, but %.3f GB are certified: "
                "the images are not those of the certificate",
                self.trainer.iter,
                needs / GB,
                certified / GB,
            )

    def after_train(self) -> None:
        if self._needs:
            logger.info(
                "The certificate held for %d of %d windows of this rank. By the sizes of their "
                "images, they needed %.2f GB at most. Memory ran out %d times",
                len(self._needs) - self._misses,
                len(self._needs),
                max(self._needs) / GB,
                self._errors,
            )
