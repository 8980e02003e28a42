"""Where memory goes."""

from .meter import TensorMeter

__all__ = ["TensorMeter"]
