# Copyright (c) the d2_memfit developers.
"""Speeds of cards, for the search by time: this file goes with the search."""

from collections import Counter
from typing import Any

from ...config.cards import CARDS
from ...techniques import MOST_IN_FLIGHT
from ..dry_run import Operator, Work

# Shares of a data sheet's peaks that training reaches, fitted to published times
# (commit 23d5dbdd): of the units for float32, of tensor cores, and of the bandwidth of
# memory. Grouped convolutions reach a share of the speed of others.
_FLOAT32_UNITS, _TENSOR_CORES, _MEMORY, _GROUPED = 0.83, 0.155, 0.525, 0.11
_COPIES = 0.73  # of the bus's peak, the median of what others measured
_OTHER = (
    {"float32": 12.7e12, "tf32": 12.7e12, "float16": 25.5e12, "bfloat16": 25.5e12},
    360.0e9,
    15.75e9,
)


class Speeds:
    """Predicted seconds of a device's work."""

    name: str
    is_gpu: bool

    @property
    def _speeds(self) -> tuple[dict[str, float], float, float]:
        card = CARDS.get(self.name)
        if card is None:
            return _OTHER
        return card.flops_per_s, card.bytes_per_s, card.host_bytes_per_s

    @property
    def seconds_per_micro_batch(self) -> float:
        return 23e-3 if self.is_gpu else 0.0

    @property
    def times(self) -> str:
        return "" if self.name in CARDS else "for an RTX 3060, because no card is named"

    @property
    def copied_bytes_per_s(self) -> float:
        return self._speeds[2] * _COPIES

    def seconds(self, work: Work) -> float:
        return self._seconds_of(work.all_operators)

    def seconds_with_copies(self, forward: Work, backward: Work) -> float:
        seconds, copied_at = 0.0, 0.0
        in_flight: list[tuple[float, int]] = []  # when each copy ends, and its bytes
        parts = [self._seconds_of(copy.operators) for copy in forward.copies]
        for part, copy in zip(parts, forward.copies):
            seconds += part
            copied_at = max(copied_at, seconds) + copy.num_bytes / self.copied_bytes_per_s
            in_flight.append((copied_at, copy.num_bytes))
            while len(in_flight) > MOST_IN_FLIGHT:
                seconds = max(seconds, in_flight.pop(0)[0])
        last = self._seconds_of(forward.operators)
        ratio = self.seconds(backward) / max(sum(parts) + last, 1e-12)
        coming = [0.0, *(copy.num_bytes / self.copied_bytes_per_s for copy in forward.copies)]
        fetching = sum(max(ratio * part, other) for part, other in zip(parts, coming))
        return seconds + last + ratio * last + fetching

    def _seconds_of(self, operators: Counter[Any]) -> float:
        bytes_per_s = self._speeds[1] * _MEMORY
        computing = sum(
            times * max(of.flops / self._flops_per_s(of), of.num_bytes / bytes_per_s)
            for of, times in operators.items()
        )
        return computing + sum(operators.values()) * 22e-6

    def _flops_per_s(self, operator: Operator) -> float:
        flops_per_s = self._speeds[0]
        name, float32 = operator.number_format, flops_per_s["float32"]
        if name == "float32" and operator.kind != "matrix product":
            name = "tf32"
        speed = max(_FLOAT32_UNITS * float32, _TENSOR_CORES * flops_per_s.get(name, float32))
        return speed * (_GROUPED if operator.kind == "grouped convolution" else 1.0)
