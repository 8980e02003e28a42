"""Ways to use less memory. They know nothing of trainers."""

from .checkpointing import checkpointed
from .resize import resize_image

__all__ = ["checkpointed", "resize_image"]
