"""Memory that is nearly gone, before it is."""

__all__ = ["RisingRetries"]

# Once may be chance; thrashing, which precedes the error, goes on.
_MAX_RISING = 3


class RisingRetries:
    """Whether the CUDA allocator has to free its cache and retry again and again.

    ``torch.cuda.memory_stats()["num_alloc_retries"]`` counts how often. Each of them synchronises
    the device and costs time.
    """

    def __init__(self) -> None:
        self._last = 0
        self._num_rising = 0

    def too_close(self, num_alloc_retries: int) -> bool:
        """Give it the count once per iteration. True after three iterations in which it rose."""
        self._num_rising = self._num_rising + 1 if num_alloc_retries > self._last else 0
        self._last = num_alloc_retries
        if self._num_rising < _MAX_RISING:
            return False
        self._num_rising = 0
        return True
