# Copyright (c) the d2_memfit developers.
"""Detection of memory pressure before an out-of-memory error."""

__all__ = ["RisingRetries"]

# One rise may be chance; thrashing before the error continues.
_MAX_RISING = 3


class RisingRetries:
    """Detects that the CUDA allocator must free its cache and retry again and again.

    ``torch.cuda.memory_stats()["num_alloc_retries"]`` counts the retries. Each retry synchronises
    the device and costs time.
    """

    def __init__(self) -> None:
        self._last = 0
        self._num_rising = 0

    def too_close(self, num_alloc_retries: int) -> bool:
        """Take the count once per iteration; return True after three iterations with a rise."""
        self._num_rising = self._num_rising + 1 if num_alloc_retries > self._last else 0
        self._last = num_alloc_retries
        if self._num_rising < _MAX_RISING:
            return False
        self._num_rising = 0
        return True
