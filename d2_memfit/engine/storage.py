"""One entry per key and iteration, out of what a model logs in every forward of a window."""

from typing import Any

from detectron2.utils.events import EventStorage

__all__ = ["WindowStorage"]


class WindowStorage(EventStorage):
    """What ``get_event_storage()`` gives to the model's own code while a window runs.

    It collects scalars until :meth:`write`, then gives the run's storage their mean, weighted by
    images. Of the images and histograms of one name, the run's storage gets the window's first.
    Questions about earlier values are answered by the run's storage.

    Attributes:
        num_images: images of the micro-batch that runs now; the trainer sets it.
    """

    def __init__(self, storage: EventStorage) -> None:
        super().__init__(storage.iter)
        self.num_images = 1
        self._storage = storage
        self._scalars: dict[str, list[tuple[float, int]]] = {}
        self._hints: dict[str, bool] = {}
        self._passed_on: set[str] = set()

    def put_scalar(
        self, name: str, value: Any, smoothing_hint: bool = True, **_kwargs: Any
    ) -> None:
        name = self._current_prefix + name
        self._scalars.setdefault(name, []).append((float(value), self.num_images))
        self._hints[name] = smoothing_hint

    def put_image(self, img_name: str, img_tensor: Any) -> None:
        if img_name not in self._passed_on:
            self._passed_on.add(img_name)
            self._storage.put_image(img_name, img_tensor)

    def put_histogram(self, hist_name: str, hist_tensor: Any, bins: int = 1000) -> None:
        if hist_name not in self._passed_on:
            self._passed_on.add(hist_name)
            self._storage.put_histogram(hist_name, hist_tensor, bins)

    def history(self, name: str) -> Any:
        return self._storage.history(name)

    def histories(self) -> Any:
        return self._storage.histories()

    def latest(self) -> Any:
        return self._storage.latest()

    def write(self) -> None:
        """Give the run's storage one value per scalar."""
        for name, entries in self._scalars.items():
            images = sum(n for _, n in entries)
            mean = sum(value * n for value, n in entries) / images
            self._storage.put_scalar(name, mean, smoothing_hint=self._hints[name])
