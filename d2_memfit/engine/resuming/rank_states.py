# Copyright (c) the d2_memfit developers.
"""The states of all ranks after each iteration, for a checkpoint of the first one."""

import contextlib
import os
import struct
import uuid
from collections.abc import Callable
from typing import NamedTuple, Optional, Union

from detectron2.utils import comm

__all__ = ["RankStates", "SharedFiles"]

_SLOTS = 3  # a rank that trains on may be two votes ahead of a rank that saves
_SLOT_BYTES = 2**28  # of a sparse file
_HEADER = struct.Struct("qq")  # iteration, number of bytes


class SharedFiles(NamedTuple):
    """Files in the memory of the first rank, one for each rank."""

    name: str
    pid: int
    descriptors: list[int]


class RankStates:
    """Keeps the state that each rank needs to resume, even if that rank is killed.

    The first rank has a file in memory for each other rank, which that rank writes to after each
    window. So states are not sent. Only a rank that cannot open the file, as on another machine,
    sends its state in its report.
    """

    def __init__(self) -> None:
        self._sent: tuple[int, list[Optional[bytes]]] = (-1, [])
        self._files: Optional[SharedFiles] = None  # of the first rank
        self._own: Optional[int] = None  # this rank's file, once it is open

    def put(self, iteration: int, pack: Callable[[], bytes]) -> Union[SharedFiles, bytes, None]:
        """Keep this rank's state, and return the part of its report for the other ranks.

        Args:
            pack: makes the state. The first rank makes its own when it saves.
        """
        if comm.is_main_process():
            self._files = self._files or _create()
            return self._files
        state = pack()
        if self._own is None:
            return state
        start = iteration % _SLOTS * _SLOT_BYTES
        os.pwrite(self._own, state, start + _HEADER.size)
        os.pwrite(self._own, _HEADER.pack(iteration, len(state)), start)
        return None

    def receive(self, iteration: int, reported: list[Union[SharedFiles, bytes, None]]) -> None:
        """Keep the states in the reports of all ranks, and open this rank's file."""
        self.keep(iteration, [r if isinstance(r, bytes) else None for r in reported])
        if self._own is None and isinstance(reported[0], SharedFiles):
            self._own = _open(reported[0], comm.get_rank())

    def keep(self, iteration: int, states: list[Optional[bytes]]) -> None:
        """Keep states of all ranks that were sent."""
        self._sent = iteration, states

    def after(self, iteration: int) -> list[Optional[bytes]]:
        """The states of all ranks after an iteration; None where it is not known."""
        sent_at, states = self._sent
        known = states if sent_at == iteration and states else [None] * comm.get_world_size()
        return [state or self._read(rank, iteration) for rank, state in enumerate(known)]

    def _read(self, rank: int, iteration: int) -> Optional[bytes]:
        if self._files is None or not self._files.descriptors:
            return None
        file, start = self._files.descriptors[rank], iteration % _SLOTS * _SLOT_BYTES
        header = os.pread(file, _HEADER.size, start)
        if len(header) < _HEADER.size:
            return None
        written_at, size = _HEADER.unpack(header)
        return os.pread(file, size, start + _HEADER.size) if written_at == iteration else None


def _create() -> SharedFiles:
    name = f"d2_memfit-{uuid.uuid4().hex}"
    ranks = comm.get_world_size() if hasattr(os, "memfd_create") else 0
    return SharedFiles(name, os.getpid(), [os.memfd_create(name) for _ in range(ranks)])


def _open(files: SharedFiles, rank: int) -> Optional[int]:
    """This rank's file; None on another machine, or where there are none."""
    with contextlib.suppress(OSError, IndexError):
        path = f"/proc/{files.pid}/fd/{files.descriptors[rank]}"
        if files.name in os.readlink(path):
            return os.open(path, os.O_WRONLY)
    return None
