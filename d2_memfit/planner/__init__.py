"""What a job needs, said before it is trained, and without a GPU."""

from .estimate import MemoryEstimate, estimate_memory

__all__ = ["MemoryEstimate", "estimate_memory"]
