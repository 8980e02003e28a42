# Copyright (c) the d2_memfit developers.
from d2_memfit.memory import RisingRetries


def test_three_iterations_with_retries_in_a_row_are_too_close():
    watch = RisingRetries()
    counts = [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8]
    assert [i for i, n in enumerate(counts) if watch.too_close(n)] == [6, 9]
