"""What of d2_memfit works with a job, found by two small iterations of it on the CPU."""

from .examination import Finding, examine

__all__ = ["Finding", "examine"]
