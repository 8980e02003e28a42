# Copyright (c) the d2_memfit developers.
"""An event storage that makes one entry per key and iteration from a window's forwards."""

from typing import Any

from detectron2.utils.events import EventStorage

__all__ = ["WindowStorage"]


class WindowStorage(EventStorage):
    """The storage that the model's code gets from ``get_event_storage()`` while a window runs.

    Scalars stay here until :meth:`write` gives the run's storage their mean, weighted by images.
    Images and histograms go to the run's storage at once. ``history``, ``histories`` and ``latest``
    prefer the window's values and fall back to those of the run's storage.
    """

    def __init__(self, storage: EventStorage) -> None:
        super().__init__(storage.iter)
        self._storage = storage
        self.num_images = 1  # behind the entries to come
        # Each entry of a scalar: its name, the value and its iteration, and the images behind it.
        self._entries: list[tuple[str, tuple[float, int], int]] = []
        self.put_image = storage.put_image
        self.put_histogram = storage.put_histogram

    def put_scalar(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().put_scalar(name, value, *args, **kwargs)
        full = self._current_prefix + name
        self._entries.append((full, self._latest_scalars[full], self.num_images))

    def history(self, name: str) -> Any:
        own = super().histories()
        return own[name] if name in own else self._storage.history(name)

    def histories(self) -> Any:
        return {**self._storage.histories(), **super().histories()}

    def latest(self) -> Any:
        return {**self._storage.latest(), **super().latest()}

    def num_entries(self) -> int:
        """The number of entries so far, for :meth:`rewind`."""
        return len(self._entries)

    def rewind(self, num_entries: int) -> None:
        """Drop the entries after the first ones, and a name scope that an error left open."""
        del self._entries[num_entries:]
        self._history.clear()
        self._latest_scalars.clear()
        for name, (value, iteration), _ in self._entries:
            self._history[name].update(value, iteration)
            self._latest_scalars[name] = (value, iteration)
        self._current_prefix = ""

    def write(self) -> None:
        """Write one value per scalar and iteration to the run's storage."""
        values: dict[tuple[str, int], list[tuple[float, int]]] = {}
        for name, (value, iteration), num_images in self._entries:
            values.setdefault((name, iteration), []).append((value, num_images))
        for (name, iteration), entries in values.items():
            mean = sum(v * n for v, n in entries) / sum(n for _, n in entries)
            # Only main's put_scalar can be told an iteration other than the current one.
            at = {} if iteration == self.iter else {"cur_iter": iteration}
            hint = self.smoothing_hints()[name]
            self._storage.put_scalar(name, mean, smoothing_hint=hint, **at)
