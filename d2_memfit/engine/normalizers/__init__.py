# Copyright (c) the d2_memfit developers.
"""What losses are divided by: declared by the model, an adapter or the user, and tested."""

from .adapters import adapt_criteria
from .communication import Communication, CommunicationError
from .normalizers import CountReport, Normalizers
from .trial import RIGHT, Trial
from .trial_forwards import SameDraws, without_traces
from .verdict import Verdict, judged, published_distance

__all__ = [
    "RIGHT",
    "Communication",
    "CommunicationError",
    "CountReport",
    "Normalizers",
    "SameDraws",
    "Trial",
    "Verdict",
    "adapt_criteria",
    "judged",
    "published_distance",
    "without_traces",
]
