# Copyright (c) the d2_memfit developers.
"""NVIDIA's cards by name, and the budgets of cards."""

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..common.checks import did_you_mean
from ..common.errors import ConfigError

__all__ = ["CARDS", "PRESETS", "Card", "find_card", "settings_of_card", "why_no_card_has"]

# Memory, in GB of 2^30 bytes, that a process may take of a card of a nominal size: the smallest
# "total capacity" that PyTorch reports for one, less 0.1. A card with a desktop has 0.3 to 1 GB
# less: MEMFIT.BUDGET_GB "auto" measures the free memory.
#
# Drivers from 2024 on keep some 0.4 GB, earlier ones 0.2: a 6 GB RTX 2060 had 5.79
# (facebookresearch/meshrcnn#92) and has 5.60. The smallest found in public logs, November 2026:
# 4: RTX 3050 Laptop, 3.62. 5: MIG slice 1g.5gb of an A100, 4.75. 6: 5.60. 8: RTX 2080 SUPER, 7.60.
# 10: RTX 3080, 9.62 (9.78 in zai-org/CogVideo#34). 11: RTX 2080 Ti, 10.56. 12: RTX 3060, 11.62.
# 16: T4, 14.56 (Zheng-Chong/CatVTON#133). 24: A10 and L4, 21.96 (23,028 MiB in nvidia-smi:
# modal-labs/modal-client#2797). 32: RTX 5090, 31.34 (31.37 in Wan-Video/Wan2.1#465). 40: A100,
# 39.38. 48: L40, 44.34 (44.40 in QwenLM/Qwen3-VL#2097). 80: A100, 79.14 (lianqi1008/Control-GIC#6).
# fmt: off
PRESETS = {
    "4GB": 3.5, "5GB": 4.6, "6GB": 5.5, "8GB": 7.5, "10GB": 9.5, "11GB": 10.4, "12GB": 11.5,
    "16GB": 14.4, "24GB": 21.8, "32GB": 31.2, "40GB": 39.2, "48GB": 44.2, "80GB": 79.0,
}
# fmt: on


@dataclass(frozen=True)
class Card:
    """A row of cards.csv, which names the sources of its numbers.

    Attributes:
        device: the name for ``--device``: rtx_3060, and rtx_3060_8gb for a rarer size.
        name: the card's name without its memory and NVIDIA's, as PyTorch reports it.
        memory_gb: nominal memory.
        usable_gb: memory that PyTorch reports.
        context_mb: memory of an empty CUDA context.
        remarks: "float16 fails" if training in it is known to give NaN, "unified" if CPU and GPU
            share one memory, or nothing.
    """

    device: str
    name: str
    memory_gb: float
    usable_gb: float
    context_mb: float
    remarks: str

    @property
    def budget_gb(self) -> float:
        """What a process may take: the usable memory less 0.1 GB, as for a preset."""
        return math.floor(10 * self.usable_gb - 1 + 1e-6) / 10


def _read_table() -> dict[str, Card]:
    """The rows of cards.csv by device."""
    lines = (Path(__file__).parent / "cards.csv").read_text().splitlines()
    _head, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    cards: dict[str, Card] = {}
    for name, size, usable, _capability, context, remarks in rows:
        device = "_".join(_words(name))
        device += f"_{size}gb" if device in cards else ""
        cards[device] = Card(device, name, float(size), float(usable), float(context), remarks)
    return cards


# Of forms of a card, such as Max-Q and PCIe, the memory is the same.
_NOISE = re.compile(
    r"nvidia|geforce|tesla|quadro|gpu|graphics|card|blackwell|generation|workstation|server|edition"
    r"|developer|kit|module|with|design|hbm\de?|max|q|maxq|pcie?|sxm\d?"
)
_SIZE = re.compile(r"(?i)(?<![a-z\d.])(\d+) ?(?:gb|gib|g)\b")


def _words(text: str) -> list[str]:
    """The words that tell cards apart."""
    words = re.findall(r"[a-z0-9.]+", text.lower())
    return [word for word in words if not _NOISE.fullmatch(word)]


def _joined(text: str) -> str:
    """The words without the series, which people leave out."""
    return re.sub("^(rtx|gtx|jetson)", "", "".join(_words(text)))


CARDS = _read_table()


def cards_named(text: str) -> list[Card]:
    """The cards with a name as people or PyTorch write it, one for each size, the usual one first.

    "rtx3060", "3060" and "NVIDIA GeForce RTX 3060" are the same. A size in the name does not count.
    """
    name = _joined(_SIZE.sub(" ", text))
    # Laptops of GTX 10 and 16 and RTX 20 have the memory of the card for desktops.
    names = name, re.sub(r"^(1[06]\d0.*|20[678]0.*)laptop$", r"\1", name)
    found = ([card for card in CARDS.values() if _joined(card.name) == n] for n in names)
    return next(filter(None, found), [])


def find_card(text: str, gigabytes: Optional[float] = None) -> Optional[Card]:
    """The card with a name, or None.

    Args:
        gigabytes: its memory, if something else than the name tells it: the nearest size counts.
    """
    cards, size = cards_named(text), _SIZE.search(text)
    if cards and gigabytes is not None:
        return min(cards, key=lambda card: abs(card.memory_gb - gigabytes))
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
        return {"MEMFIT.PRESET": "", "MEMFIT.BUDGET_GB": card.budget_gb}
    size = re.fullmatch(r"(\d+) ?(?:gb|gib|g)?", text.strip().lower())
    if size and f"{size[1]}GB" in PRESETS:
        return {"MEMFIT.PRESET": f"{size[1]}GB", "MEMFIT.BUDGET_GB": None}
    # The cards of this name with another size, or all.
    names = [card.device.replace("_", " ").upper() for card in cards_named(text) or CARDS.values()]
    hint = did_you_mean(" ".join(_words(text)).upper(), [*PRESETS, *names])
    there = f"There are {', '.join(PRESETS)}, and names of NVIDIA's cards"
    raise ConfigError(
        f"--card: {text!r} is not known{hint}. {there}. For others, also of other makers, --budget "
        "takes any number of GB (docs/MACHINES.md)"
    )


def why_no_card_has(budget_gb: float) -> Optional[str]:
    """The problem with a budget that equals a card's nominal memory; None if there is none."""
    for name, usable_gb in PRESETS.items():
        if usable_gb < budget_gb <= float(name.removesuffix("GB")):
            return (
                f"MEMFIT.BUDGET_GB {budget_gb:g}: a process can take about {usable_gb:g} GB of a "
                f"card that is sold as {name}. To plan for such a card: --card {name}"
            )
    return None
