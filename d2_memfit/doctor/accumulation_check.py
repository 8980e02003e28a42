# Copyright (c) the d2_memfit developers.
"""Whether images one by one have the gradient of one forward over all of them."""

from typing import Any

import torch

from ..engine.loss_check import LossReport, check_losses
from ..engine.window import images_of
from .patient import Patient, Untested, Unwell

__all__ = ["accumulates", "counts"]


def accumulates(patient: Patient) -> str:
    """Check the losses as a training does before its first window."""
    report = _checked(patient)
    if report.off:
        raise Unwell("; ".join(report.complaints()))
    if not report.names:
        raise Untested(str(report))
    return str(report)


def counts(patient: Patient) -> str:
    """Places in the code whose counts are those of the window."""
    places = sorted({"{}:{}".format(*place[0]) for _, place, _ in _checked(patient).counts})
    return f"counted over the window: {', '.join(places)}" if places else "none found"


def _checked(patient: Patient) -> LossReport:
    images = images_of(patient.crowded)
    if images is None:
        raise Untested("not tested: batches cannot be cut into images")
    if patient.report is None:
        images = [_with_pixels(image, seed) for seed, image in enumerate(images)]
        model, options = patient.model(), patient.job.normalizers
        patient.report = patient.call(check_losses, model, patient.losses, images, options)
    return patient.report


def _with_pixels(image: Any, seed: int) -> Any:
    """The image with random pixels: those of a stand-in are all the same."""
    pixels = image.get("image") if isinstance(image, dict) else None
    if not isinstance(pixels, torch.Tensor):
        return image
    generator = torch.Generator().manual_seed(seed)
    return {**image, "image": torch.randint(256, pixels.shape, generator=generator).to(pixels)}
