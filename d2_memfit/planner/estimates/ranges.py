# Copyright (c) the d2_memfit developers.
"""How far the memory of a run may be from its estimate, by source.

objects
    The estimate has the most crowded images in one batch. A run with the mean number of objects in
    each image needs less. If the largest number is a guess, the range is as wide upwards.
software
    Versions of PyTorch, cuDNN and the driver take other workspaces and keep other tensors. The
    share is chosen on the published rows in docs/PUBLISHED_MEMORY.md that are used for something:
    at least 90% of them are in their range. How often others are, stands there too.
allocator
    Memory between blocks, which depends on the order of all sizes of a run: none, or twice as much
    as the allocator's model finds. A guess.
context
    287 MB (pytorch#86509) to 426 MB, reported by others, and none to 380 MB of loaded kernels (the
    whole of what pytorch#86509 measured without lazy loading). Nothing for a device file of one's
    own, whose context is measured.
"""

from typing import Optional

from ..device import DeviceModel, DeviceUse, device_names

__all__ = ["OF_TENSORS", "SHARE_OF_SOFTWARE", "Widths", "widths_of"]

SHARE_OF_SOFTWARE = 0.06  # of the tensors, in both directions
_CONTEXT_MB = (287, 426 + 380)
_MB = 2**20

OF_TENSORS = ("objects", "software")  # the sources that concern what PyTorch has allocated

Widths = dict[str, tuple[int, int]]  # bytes below and above an estimate, by source


def widths_of(
    use: DeviceUse, device: DeviceModel, typical_bytes: Optional[int], is_guess: bool
) -> Widths:
    """Distances of both ends of an interval from an estimate, by source.

    Args:
        use: the estimated worst case.
        typical_bytes: peak allocated with the mean number of objects; None if it is not known.
        is_guess: whether the largest number of objects is a guess.
    """
    of_objects = max(use.allocated_bytes - (typical_bytes or use.allocated_bytes), 0)
    widths = {"objects": (of_objects, of_objects if is_guess else 0)}
    if not device.is_gpu:  # the same software, and no context
        return {**widths, **dict.fromkeys(("software", "allocator", "context"), (0, 0))}
    of_software = round(SHARE_OF_SOFTWARE * use.allocated_bytes)
    between = use.outside["between blocks"]
    context = use.outside["context"] + use.outside["loaded kernels"]
    least, most = (megabytes * _MB for megabytes in _CONTEXT_MB)
    is_measured = device.name not in device_names()
    return {
        **widths,
        "software": (of_software, of_software),
        "allocator": (between, between),
        "context": (0, 0) if is_measured else (max(context - least, 0), max(most - context, 0)),
    }
