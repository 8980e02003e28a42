# Copyright (c) the d2_memfit developers.
"""The images of one optimizer step, cut into micro-batches, and the storage of their scalars."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from detectron2.utils.events import EventStorage

from ..common.errors import START_HERE, ConfigError, DataError, HostMemoryError
from ..job import objects_in
from ..memory import error_line, is_loader_out_of_memory


@dataclass(frozen=True, eq=False)
class Row:
    """One image of a batch in columns, such as (images, targets): its entry in each column."""

    parts: tuple[Any, ...]
    batch: Any  # an empty one of the same type


@dataclass
class MicroBatch:
    """The data of one forward and backward.

    ``data`` is a batch as the loader gave it, or a list of images: dataset dicts, or rows of a
    batch in columns.
    """

    data: Any
    losses: dict[str, torch.Tensor] = field(default_factory=dict)  # detached, set by the trainer

    def __post_init__(self) -> None:
        self.num_images = count_images(self.data)

    @property
    def batch(self) -> Any:
        """The data in the form that the loader gives and the model takes."""
        return as_given(self.data)

    @property
    def can_be_split(self) -> bool:
        return self.num_images > 1 and images_of(self.data) is not None

    @property
    def phase(self) -> str:
        """The phase in which it is: its forward, until its losses are known, or its backward."""
        return "backward" if self.losses else "forward"

    @property
    def image(self) -> Any:
        """The only image, for :meth:`Window.replace`; or the data, if it is not a list of one."""
        return self.data[0] if self.num_images == 1 and _is_list_of_images(self.data) else self.data

    def keep_names_only(self) -> None:
        """Free the images and keep their names."""
        if images_of(self.data) is not None:
            self.data = [
                {k: image[k] for k in ("file_name", "image_id") if k in image}
                for image in dataset_dicts(self.data)
            ]


class Window:
    """The micro-batches of one iteration, taken from the loader one after another.

    Because batches are taken one by one, the loader's workers prepare the next batch while the
    model computes. Images that did not fit can be put back and taken again in smaller pieces.

    Args:
        batches: the loader's iterator.
        accumulation_steps: number of its batches in a window.

    Attributes:
        micro_batches: those taken so far.
        data_time: seconds spent waiting for the loader so far.
        expected_images: ``accumulation_steps`` times the images of the first batch, known once that
            batch was taken. With batches of one size it is the window's number of images.
    """

    def __init__(self, batches: Iterator[Any], accumulation_steps: int) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.data_time = 0.0
        self._batches = batches
        self.accumulation_steps = accumulation_steps
        self.expected_images = self._steps_taken = 0
        self._waiting: deque[Any] = deque()  # loaded or put back; taken before new batches

    def load_all(self) -> list[Any]:
        """Load the whole window now. The micro-batches taken so far do not change.

        Returns:
            The images to come; none if the batches cannot be cut.
        """
        self._waiting = deque(iter(self._next_batch, None))
        parts = [images_of(data) for data in self._waiting]
        return [] if None in parts else [image for part in parts for image in part or ()]

    def take(
        self, num_images: Optional[int] = None, across_batches: bool = True
    ) -> Optional[MicroBatch]:
        """Take the next micro-batch; None at the window's end.

        Args:
            num_images: images to take; None takes one of the loader's batches.
            across_batches: whether to fill up with images of the next batches; the last micro-batch
                may have fewer. Otherwise, batches are only cut.

        Raises:
            DataError: the loader ended within the window.
            HostMemoryError: the loader ran out of memory.
            ConfigError: its batches are neither lists of dataset dicts nor in columns, so they
                cannot be cut.
        """
        data = self._next_batch()
        if data is None:
            return None
        if num_images is not None:
            data = self._regroup(data, num_images, across_batches)
        self.micro_batches.append(MicroBatch(data))
        return self.micro_batches[-1]

    def last_data(self) -> Any:
        """The data of the micro-batch that was taken last; an empty list before the first."""
        return self.micro_batches[-1].data if self.micro_batches else []

    def put_back(self) -> None:
        """Undo the last :meth:`take`."""
        self._waiting.appendleft(self.micro_batches.pop().data)

    def put_all_back(self) -> None:
        """Undo every :meth:`take`. The images come again in the same order."""
        while self.micro_batches:
            self.put_back()

    def replace(self, old: Any, new: Any) -> None:
        """Take ``new`` in place of ``old``, an image or batch that was put back.

        Args:
            new: None drops ``old``.
        """
        for i, data in enumerate(self._waiting):
            if data is old:
                self._waiting[i] = new
            elif _is_list_of_images(data):
                images = [new if image is old else image for image in data]
                self._waiting[i] = [image for image in images if image is not None] or None
        self._waiting = deque(data for data in self._waiting if data is not None)

    @property
    def num_images(self) -> int:
        """Number of images taken so far."""
        return sum(m.num_images for m in self.micro_batches)

    def _next_batch(self) -> Any:
        if self._waiting:
            return self._waiting.popleft()
        if self._steps_taken == self.accumulation_steps:
            return None
        start = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise DataError(
                f"the data loader ended after {self._steps_taken} of the {self.accumulation_steps} "
                "batches of an iteration. Train with an endless loader, as of "
                "build_detection_train_loader, or lower SOLVER.MAX_ITER"
            ) from None
        except Exception as e:
            if not is_loader_out_of_memory(e):
                raise
            raise host_memory_error(error_line(e)) from e
        self.data_time += time.perf_counter() - start
        if self._steps_taken == 0:
            self.expected_images = self.accumulation_steps * count_images(batch)
        self._steps_taken += 1
        return batch

    def _regroup(self, data: Any, num_images: int, across_batches: bool) -> list[Any]:
        images: list[Any] = []
        while data is not None:
            parts = images_of(data)
            if parts is None:
                raise ConfigError(
                    "micro-batches of MEMFIT.MICRO_BATCH images need a data loader that gives "
                    f"lists of dataset dicts, and this one gives a {type(data).__name__}"
                )
            images += parts
            if len(images) >= num_images or not across_batches:
                break
            data = self._next_batch()
        if len(images) > num_images:
            self._waiting.appendleft(images[num_images:])
        return images[:num_images]


def host_memory_error(what: str) -> HostMemoryError:
    """The error to raise after a loader ran out of memory."""
    return HostMemoryError(
        f"the data loader ran out of the host's memory ({what}). Lower "
        "DATALOADER.NUM_WORKERS: each worker has images, and memory, of its own. More: "
        f"{START_HERE}"
    )


def image_names(data: Any) -> str:
    """Names of a micro-batch's images, for messages."""
    names = [
        f"{image.get('file_name', 'without file_name')} (image_id {image.get('image_id')})"
        for image in dataset_dicts(data)
    ]
    return ", ".join(names) or f"without names, of a {type(data).__name__}"


def count_images(data: Any) -> int:
    """Number of images of a batch: rows if it is in columns, or the length of a tensor.

    Data of any other kind counts as one.
    """
    if _is_in_columns(data):
        return len(data[0])
    return len(data) if _is_list_of_images(data) or isinstance(data, torch.Tensor) else 1


def count_objects(data: Any) -> int:
    """Number of annotated objects of a batch."""
    return sum(objects_in(image) or 0 for image in dataset_dicts(data))


def dataset_dicts(data: Any) -> Iterator[dict[str, Any]]:
    """All dataset dicts in a batch of any kind."""
    if isinstance(data, dict):
        yield data
    elif isinstance(data, (list, tuple, Row)):
        for part in data.parts if isinstance(data, Row) else data:
            yield from dataset_dicts(part)


def images_of(data: Any) -> Optional[list[Any]]:
    """The images of data that can be cut; None if it cannot be cut."""
    if _is_list_of_images(data):
        return data
    if not _is_in_columns(data):
        return None
    columns = [c.split(1) if isinstance(c, torch.Tensor) else c for c in data]
    empty = _like(data, [c[:0].clone() if isinstance(c, torch.Tensor) else c[:0] for c in data])
    return [Row(row, empty) for row in zip(*columns)]


def as_given(data: Any) -> Any:
    """Convert a micro-batch's data to the form that its loader gave.

    Lists in columns are copied, because a model may append to them.
    """
    if _is_in_columns(data):
        return _like(data, [list(c) if isinstance(c, list) else c for c in data])
    if not (isinstance(data, list) and data and isinstance(data[0], Row)):
        return data
    columns = zip(*(row.parts for row in data))
    return _like(data[0].batch, [_joined(c, parts) for c, parts in zip(data[0].batch, columns)])


def _like(batch: Any, columns: Sequence[Any]) -> Any:
    """A batch of the same type; a named tuple has its own constructor."""
    return getattr(type(batch), "_make", type(batch))(columns)


def _joined(column: Any, parts: Sequence[Any]) -> Any:
    if isinstance(column, torch.Tensor):
        return torch.cat(list(parts))
    return list(parts) if isinstance(column, list) else tuple(parts)


def _is_list_of_images(data: Any) -> bool:
    """Whether the data is a list of dataset dicts, or of rows of a batch in columns."""
    return isinstance(data, list) and all(isinstance(image, (dict, Row)) for image in data)


def _is_in_columns(data: Any) -> bool:
    """Whether a batch is a tuple of equally long lists, tuples or tensors."""
    if not isinstance(data, tuple) or not all(
        isinstance(c, (list, tuple)) or (isinstance(c, torch.Tensor) and c.dim()) for c in data
    ):
        return False
    lengths = {len(column) for column in data}
    return len(lengths) == 1 and 0 not in lengths


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
