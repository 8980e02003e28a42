# Copyright (c) the d2_memfit developers.
"""When the losses of a run are tested."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Schedule"]

_MOST_TESTS = 8
_AGAIN_AT = (100, 1000)  # iterations; a head that starts at zero has like losses at first


class Schedule:
    """Losses are tested before the first window, after 100 and 1,000 iterations, and on news.

    Args:
        is_on: False for never.

    Attributes:
        is_due: whether the next windows are tested.
        has_result: whether a test has told something.
        news: ranks that have something new since the last test.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_due = is_on
        self.has_result = False
        self.news: set[int] = set()
        self._is_on = is_on
        self._left = _MOST_TESTS

    def takes(self, objects: Sequence[int], may_have_objects: bool) -> bool:
        """Whether the windows of all ranks are tested; asked where a test is due.

        Windows without objects, which could have some, tell little. They are tested only if nothing
        is known, and the next ones are tested again.

        Args:
            objects: of each rank's window.
        """
        self.is_due = may_have_objects and not any(objects)
        if self.is_due:
            return not self.has_result
        self._left -= 1
        return True

    def end_iteration(self, iteration: int, news: Iterable[int]) -> None:
        """Note the ranks that have found something new."""
        self.news.update(news)
        is_time = self.has_result and iteration + 1 in _AGAIN_AT
        if self._is_on and (is_time or self.news):
            self.is_due = self._left > 0

    def state_dict(self) -> dict[str, Any]:
        return {"is_due": self.is_due, "tests_left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a run that has been tested."""
        self.is_due = state["is_due"]
        self._left = state["tests_left"]
        self.has_result = True
