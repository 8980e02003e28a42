# Copyright (c) the d2_memfit developers.
"""A hook that writes the owners of the memory at one moment to a file."""

import json
import logging
import os
import signal
import threading
from contextlib import ExitStack
from typing import Any, Optional

from detectron2.utils.file_io import PathManager

from ...compat.pytorch import dump_memory_snapshot, record_memory_history
from ...errors import ConfigError
from ...memory import OwnerMeter, live_tensors, used_bytes
from .memory_hook import MemoryHook

__all__ = ["MemorySnapshot"]

logger = logging.getLogger(__name__)


class MemorySnapshot(MemoryHook):
    """Writes the owners of the memory to a file, on request and when memory runs out.

    Files in ``output_dir``:

    - ``memfit_memory_<iteration>.json``: the bytes of each owner at the peak of that iteration (see
      :class:`OwnerMeter`), and the largest tensors after it;
    - ``memfit_oom_<number>.json``: both at an out-of-memory error, for the first three;
    - on a GPU, a ``.pickle`` with each, for https://docs.pytorch.org/memory_viz.

    The signal SIGUSR1 requests a file for the next iteration.

    Args:
        output_dir: a folder of this rank.
        iteration: the iteration to record; None records none.
        on_oom: whether out-of-memory errors are recorded, too.
    """

    _MAX_OOMS = 3
    _MAX_ROWS = 50
    _MAX_HISTORY = 100_000  # entries of PyTorch's allocator, some 100 MB in a file

    def __init__(self, output_dir: str, iteration: Optional[int] = None, on_oom: bool = False):
        self._output_dir = output_dir
        self._iteration = iteration
        self._on_oom = on_oom
        self._num_ooms = 0
        self._is_asked_for = False
        self._meter: Optional[OwnerMeter] = None
        self._undo = ExitStack()  # of what is done for the time of the training

    def before_train(self) -> None:
        super().before_train()
        if self._on_oom:
            if not hasattr(self._inner, "out_of_memory_observers"):
                raise ConfigError(
                    "MemorySnapshot(on_oom=True) needs an AccumulatingTrainer, and this is a "
                    f"{self._inner.__class__.__name__}"
                )
            observers = self._inner.out_of_memory_observers
            observers.append(self._write_oom)
            self._undo.callback(observers.remove, self._write_oom)
            self._record_history(True)
        self._undo.callback(self._record_history, False)
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            former = signal.signal(signal.SIGUSR1, self._ask)
            self._undo.callback(signal.signal, signal.SIGUSR1, former or signal.SIG_DFL)

    def before_step(self) -> None:
        if self._is_asked_for or self.trainer.iter == self._iteration:
            self._is_asked_for = False
            self._record_history(True)
            self._meter = OwnerMeter(self._model, self._inner.optimizer).__enter__()

    def after_step(self) -> None:
        meter = self._meter
        self._meter = None
        if meter is not None:
            meter.__exit__(None, None, None)
            _, rows = live_tensors(self._model, self._inner.optimizer, self._device)
            self._write(f"memfit_memory_{self.trainer.iter}", meter.peak_bytes, meter.peak, rows)
            self._record_history(self._on_oom)

    def after_train(self) -> None:
        super().after_train()
        if self._meter is not None:  # the iteration has failed
            self._meter.__exit__(None, None, None)
        self._undo.close()

    def _record_history(self, is_on: bool) -> None:
        if self._device.type == "cuda":
            record_memory_history(self._MAX_HISTORY if is_on else None)

    def _ask(self, *_: Any) -> None:
        self._is_asked_for = True

    def _write_oom(self) -> None:
        if self._num_ooms == self._MAX_OOMS:
            return
        self._num_ooms += 1
        total = used_bytes(self._device)
        owners, rows = live_tensors(self._model, self._inner.optimizer, self._device)
        owners["other"] = max(total - sum(owners.values()), 0)
        self._write(f"memfit_oom_{self._num_ooms}", total, owners, rows)

    def _write(
        self, name: str, total: int, owners: dict[str, int], rows: list[dict[str, Any]]
    ) -> None:
        snapshot = {
            "iteration": self.trainer.iter,
            "device": str(self._device),
            "total_bytes": total,
            "owners": {k: v for k, v in sorted(owners.items(), key=lambda i: -i[1]) if v},
            "tensors": rows[: self._MAX_ROWS],
        }
        path = os.path.join(self._output_dir, name)
        PathManager.mkdirs(self._output_dir)
        with PathManager.open(f"{path}.json", "w") as f:
            json.dump(snapshot, f, indent=1)
        if self._device.type == "cuda":
            dump_memory_snapshot(f"{path}.pickle")
        logger.info("The owners of the memory are in %s.json", path)
