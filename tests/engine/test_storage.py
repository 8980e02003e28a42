# Copyright (c) the d2_memfit developers.
"""What a window logs: one entry per key and iteration."""

import inspect
from contextlib import suppress

import pytest
from detectron2.utils.events import EventStorage

from d2_memfit.engine.storage import WindowStorage


@pytest.fixture
def storage():
    with EventStorage(7) as storage:
        storage.put_scalar("x", 1.0)
        storage.put_scalar("old", 5.0)
        yield storage


def test_a_rewind_drops_later_scalars_and_the_name_scope_that_an_error_left_open(storage):
    with WindowStorage(storage) as window:
        window.put_scalar("x", 1.0)
        num_entries = window.num_entries()
        for _ in range(2):
            with suppress(MemoryError), window.name_scope("inner"):
                window.put_scalar("y", 9.0)
                raise MemoryError
            window.rewind(num_entries)
        window.put_scalar("x", 3.0)
    window.write()
    assert storage.history("x").values() == [(1.0, 7), (2.0, 7)]
    assert set(storage.histories()) == {"x", "old"}


@pytest.mark.skipif(
    "cur_iter" not in inspect.signature(EventStorage.put_scalar).parameters,
    reason="Detectron2 v0.6 has no cur_iter",
)
def test_an_explicit_iteration_is_kept(storage):
    with WindowStorage(storage) as window:
        window.put_scalar("x", 2.0, cur_iter=100)
    window.write()
    assert storage.history("x").values() == [(1.0, 7), (2.0, 100)]
