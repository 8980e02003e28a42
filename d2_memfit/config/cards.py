# Copyright (c) the d2_memfit developers.
"""NVIDIA's cards by name, and the budget of a card."""

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..common.checks import did_you_mean
from ..errors import ConfigError
from .presets import PRESETS

__all__ = ["CARDS", "Card", "cards_named", "find_card", "settings_of_card"]


@dataclass(frozen=True)
class Card:
    """A row of cards.csv, which names the sources of its numbers.

    Attributes:
        device: the name for ``--device``: rtx_3060, and rtx_3060_8gb for a rarer size.
        name: the card's name without its memory and NVIDIA's, as PyTorch reports it.
        memory_gb: nominal memory.
        usable_gb: memory that PyTorch reports.
        capability: compute capability, such as "8.6".
        context_mb: memory of an empty CUDA context.
        flops_per_s: peaks by number format, without sparsity.
        bytes_per_s: peak of the memory's bandwidth.
        host_bytes_per_s: peak of the link to the host, in one direction.
        float16_fails: whether training in float16 is known to give NaN.
        is_unified: whether CPU and GPU share one memory.
    """

    device: str
    name: str
    memory_gb: float
    usable_gb: float
    capability: str
    context_mb: float
    flops_per_s: dict[str, float]
    bytes_per_s: float
    host_bytes_per_s: float
    float16_fails: bool
    is_unified: bool

    @property
    def budget_gb(self) -> float:
        """What a process may take: the usable memory less 0.1 GB, as for a preset."""
        return math.floor(10 * self.usable_gb - 1 + 1e-6) / 10

    @property
    def settings(self) -> dict[str, Any]:
        """Keys and values of the budget."""
        return {"MEMFIT.PRESET": "", "MEMFIT.BUDGET_GB": self.budget_gb}


def _read_table() -> dict[str, Card]:
    """The rows of cards.csv by device."""
    lines = (Path(__file__).parent / "cards.csv").read_text().splitlines()
    rows = csv.reader(line for line in lines if not line.startswith("#"))
    header, *cells = [[cell.strip() for cell in row] for row in rows]
    cards: dict[str, Card] = {}
    for row in (dict(zip(header, line)) for line in cells):
        device = _plain(row["card"]).replace(" ", "_")
        device += f"_{row['GB']}gb" if device in cards else ""
        cards[device] = _card(device, row)
    return cards


def _card(device: str, row: dict[str, str]) -> Card:
    columns = {"float32": "float32", "tf32": "tf32", "float16": "16 bits"}
    # Before Ampere, no units compute in bfloat16.
    columns["bfloat16"] = "16 bits" if float(row["capability"]) >= 8 else "float32"
    columns["float8_e4m3fn"] = columns["float8_e5m2"] = "fp8"
    return Card(
        device=device,
        name=row["card"],
        memory_gb=float(row["GB"]),
        usable_gb=float(row["usable GB"]),
        capability=row["capability"],
        context_mb=float(row["context MB"]),
        flops_per_s={name: float(row[c]) * 1e12 for name, c in columns.items() if row[c]},
        bytes_per_s=float(row["GB/s"]) * 1e9,
        host_bytes_per_s=float(row["host GB/s"]) * 1e9,
        float16_fails=row["remarks"] == "float16 fails",
        is_unified=row["remarks"] == "unified",
    )


_WORDS = re.compile(
    r"\b(nvidia|geforce|tesla|quadro|gpu|graphics|card|blackwell|generation|workstation|"
    r"server|edition|developer|kit|module|with|design|hbm\de?)\b"
)
_FORM = re.compile(r"\b(pcie?|sxm\d?)\b")
_SIZE = re.compile(r"(?<![\w.])(\d+) ?(?:gb|gib|g)\b")
# Laptops' GTX 10, GTX 16 and RTX 20 have the memory, and most the name, of the card for desktops.
_LIKE_DESKTOPS = re.compile(r"((?:gtx )?1[06]\d0.*?|(?:rtx )?20[678]0.*?) (?:laptop|max q)")
_PREFIXES = ("", "rtx ", "gtx ", "jetson ")
_ALSO = {  # other names
    "gh200 480gb": "gh200",  # PyTorch's, with the memory of the CPU
    "gtx titan x pascal": "titan x pascal",
    "dgx spark": "gb10",
    "thor": "jetson agx thor",
    "jetson thor": "jetson agx thor",
    "agx thor": "jetson agx thor",
}
_OTHER_MAKERS = {
    "Apple": re.compile(r"\b(apple|mps|macbook|mac|m\d( (pro|max|ultra))?)\b"),
    "AMD": re.compile(r"\b(amd|radeon|instinct|rx|vega|firepro|mi ?\d+[a-z]?)\b"),
    "Intel": re.compile(r"\b(intel|arc|iris|uhd|gaudi|a[357]\d0m?|b5[78]0)\b"),
}


def _plain(text: str) -> str:
    """A name in the words that tell cards apart: "NVIDIA GeForce RTX3060Ti" is rtx 3060 ti."""
    text = re.sub(r"[^a-z0-9.]+", " ", text.lower())
    text = re.sub(r"\b(gtx|rtx|titan|jetson|pro)(?=\d)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super|laptop)\b", r" \1", text)
    text = re.sub(r"\b(mobile|notebook)\b", "laptop", text).replace("maxq", "max q")
    return " ".join(_WORDS.sub("", text).split())


CARDS = _read_table()
_BY_NAME: dict[str, list[Card]] = {}
for _of_table in CARDS.values():
    _BY_NAME.setdefault(_plain(_of_table.name), []).append(_of_table)


def cards_named(text: str) -> list[Card]:
    """The cards with a name as people or PyTorch write it, one for each size, the usual one first.

    "rtx3060", "3060" and "NVIDIA GeForce RTX 3060" are the same. A size in the name does not count.
    """
    whole = _plain(text)
    name = " ".join(_SIZE.sub("", _ALSO.get(whole, whole)).split())
    without_form = " ".join(_FORM.sub("", name).split())
    like_desktops = _LIKE_DESKTOPS.fullmatch(without_form)
    for one in (name, without_form, like_desktops[1] if like_desktops else ""):
        for prefix in _PREFIXES:
            if prefix + one in _BY_NAME:
                return _BY_NAME[prefix + one]
    return []


def find_card(text: str, gigabytes: Optional[float] = None) -> Optional[Card]:
    """The card with a name, or None.

    Args:
        gigabytes: its memory, if something else than the name tells it: the nearest size counts.
    """
    cards = cards_named(text)
    if cards and gigabytes is not None:
        return min(cards, key=lambda card: abs(card.memory_gb - gigabytes))
    size = None if _plain(text) in _ALSO else _SIZE.search(_plain(text))
    return next((c for c in cards if size is None or c.memory_gb == float(size[1])), None)


def settings_of_card(text: str) -> dict[str, Any]:
    """Keys and values of the budget of a card, for ``--card``.

    A name, such as "RTX 3060 Laptop" or "GeForce GTX 1060 3 GB", means what that card has. A size,
    such as 6GB or 6, means the preset, which nearly each card of that size has.

    Raises:
        ConfigError: there is no such card. The message says what there is, and what to type.
    """
    card = find_card(text)
    if card is not None:
        return card.settings
    size = re.fullmatch(r"(\d+) ?(?:gb|gib|g)?", _plain(text))
    if size and f"{size[1]}GB" in PRESETS:
        return {"MEMFIT.PRESET": f"{size[1]}GB", "MEMFIT.BUDGET_GB": None}
    raise ConfigError(f"--card: {text!r} {_why_unknown(text)}")


def _why_unknown(text: str) -> str:
    name = _plain(text)
    cards = cards_named(text)
    if cards:
        sizes = ", ".join(f"{card.memory_gb:g}GB" for card in cards)
        return f"is not known: {cards[0].name} comes with {sizes}. --budget takes any number"
    for maker, pattern in _OTHER_MAKERS.items():
        if pattern.search(name) and not re.search(r"nvidia|geforce|tesla|quadro", text.lower()):
            return (
                f"looks like a GPU of {maker}, and all cards here are NVIDIA's. What holds for it "
                "is the tensors' memory in a dry run; the allocator, the context, times and the "
                "enforcement of budgets were made for CUDA. For the tensors, type --budget and the "
                "GB that they may take (docs/MACHINES.md)"
            )
    known = [*PRESETS, *map(str.upper, _BY_NAME)]
    return (
        f"is not known{did_you_mean(name.upper(), known)}. There are {', '.join(PRESETS)}, and "
        "names of NVIDIA's cards. For another card, give its memory. For other amounts, --budget "
        "takes any number"
    )
