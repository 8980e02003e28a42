# Copyright (c) the d2_memfit developers.
"""Collectives in a forward that are not counts, which a rank cannot repeat alone."""

import logging
from collections.abc import Sequence

from detectron2.utils import comm

from ...counts import Collective
from ...errors import ConfigError
from ..retry import Cutter

__all__ = ["Communication", "CommunicationError", "Spared"]

logger = logging.getLogger(__name__)


class CommunicationError(Exception):
    """A model communicates in its forward unexpectedly. All ranks are told."""


class Spared(CommunicationError):
    """A function of the model cannot work with the pretended second rank."""


class Communication:
    """Knowledge about a model's communication in its forward.

    Args:
        may_retry: whether a rank may run its images again.
        cutter: cuts the trainer's windows. With MEMFIT.MICRO_BATCH, ranks continue without retries,
            in micro-batches of that size.

    Attributes:
        found: the first collective that was seen, as text; "" if there was none.
        known: the same, once all ranks know it.
    """

    def __init__(self, may_retry: bool, cutter: Cutter) -> None:
        self.found = ""
        self.known = ""
        self._may_retry = may_retry
        self._cutter = cutter
        self._is_alone = comm.get_world_size() == 1  # a forward may be told otherwise

    @property
    def may_recover(self) -> bool:
        """Whether a rank may run a forward again after an out-of-memory error."""
        return self._may_retry and not self.known

    def handle(self, call: Collective) -> bool:
        """Handle a collective in a window for
        :func:`~d2_memfit.counts.collectives.noticed_collectives`.

        Raises:
            CommunicationError: ranks run images again alone, and no test has found it.
        """
        if self._is_alone:
            return self.note(call)
        if not self.known and self._may_retry:
            raise CommunicationError(str(call))
        self.found = self.found or str(call)
        return False  # the other ranks make the same call

    def note(self, call: Collective) -> bool:
        """Answer a collective in a forward that no other rank runs, whether there is one or not.

        Raises:
            CommunicationError: it cannot be answered without other ranks.
        """
        if call.num_ranks == 1:  # a group of this process alone
            return False
        self.found = self.found or str(call)
        is_harmless = not self._is_alone or call.name in ("barrier", "broadcast", "reduce")
        if not (is_harmless and call.run_alone()):
            raise CommunicationError(str(call))
        return True

    def allow(self, found: str) -> None:
        """Decide, on all ranks, how to continue after any rank found a collective.

        Raises:
            ConfigError: the model cannot be trained with these options.
        """
        if self._may_retry and not self._cutter.is_configured:
            raise ConfigError(
                f"MEMFIT.OOM.POLICY split cannot run a rank's images again, because {found} "
                "communicates with other ranks in each forward. Train without it, such as with "
                "MODEL.*.NORM GN in place of SyncBN; or set MEMFIT.OOM.POLICY raise"
            )
        logger.warning(
            "The model communicates in its forward, %s. Each micro-batch communicates with one "
            "micro-batch of every other rank. If losses are divided by the result, use "
            "d2_memfit.window_count",
            found,
        )
        self.known = found
        self._cutter.forget()

    def check(self, numbers_of_micro_batches: Sequence[int]) -> None:
        """Raise :class:`ConfigError`, on all ranks, if some ranks would wait for others."""
        if self.known and len(set(numbers_of_micro_batches)) > 1:
            raise ConfigError(
                f"the model communicates in its forward, {self.known}, so all ranks need the same "
                f"number of micro-batches, and they have {list(numbers_of_micro_batches)}. Give "
                "all ranks the same number of images, or train without that, such as with "
                "MODEL.*.NORM GN in place of SyncBN"
            )
