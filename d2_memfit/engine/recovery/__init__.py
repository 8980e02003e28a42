# Copyright (c) the d2_memfit developers.
"""What happens when memory runs out, in training and in inference."""

from .inference import recovering_inference
from .oom_record import observed
from .recovery import Recovery, RecoveryReport

__all__ = [
    "Recovery",
    "RecoveryReport",
    "observed",
    "recovering_inference",
]
