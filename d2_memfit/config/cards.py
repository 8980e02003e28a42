# Copyright (c) the d2_memfit developers.
"""NVIDIA's cards by name, with their nominal memory."""

import csv
import re
from pathlib import Path

from ..common.checks import did_you_mean
from ..errors import ConfigError
from .presets import PRESETS

__all__ = ["CARDS", "card_name", "preset_of_card"]


def _read_table() -> dict[str, dict[str, str]]:
    """The rows of cards.csv by card. The file names the sources of its numbers."""
    lines = (Path(__file__).parent / "cards.csv").read_text().splitlines()
    rows = csv.reader(line for line in lines if not line.startswith("#"))
    header, *cards = [[cell.strip() for cell in row] for row in rows]
    return {card[0]: dict(zip(header, card)) for card in cards}


CARDS = _read_table()
_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|gpu|pcie|sxm\d?)\b")
# Laptops' GTX 10, GTX 16 and RTX 20 with Max-Q Design have the memory of the card of that name.
_MAX_Q = re.compile(r"((?:gtx 1|rtx 2)[\w ]*?) (?:with )?max q(?: design)?")
_SIZE = re.compile(r"(?:^|.* )(\d+) ?(?:g|gb|gib)|(\d+)")


def preset_of_card(text: str) -> str:
    """The preset of a card that is written as 6GB, 6, RTX 3060 Laptop or "GeForce GTX 1060 3 GB".

    Raises:
        ConfigError: there is no such card. The message names the nearest ones.
    """
    name = card_name(text)
    preset = text
    if name in CARDS:
        preset = f"{CARDS[name]['GB']}GB"
    elif size := _SIZE.fullmatch(name):
        preset = f"{size[1] or size[2]}GB"
    if preset in PRESETS:
        return preset
    known = [*PRESETS, *(known.upper() for known in CARDS)]
    raise ConfigError(
        f"--card: {text!r} is not known{did_you_mean(name.upper(), known)}. There are "
        f"{', '.join(PRESETS)}, and names of NVIDIA's cards. For another card, give its "
        "memory. For other amounts, --budget takes any number"
    )


def card_name(text: str) -> str:
    """A card's name as in :data:`CARDS`: "NVIDIA GeForce RTX3060 Laptop GPU" is rtx 3060 laptop."""
    name = re.sub(r"[^a-z0-9]+", " ", text.lower())
    name = re.sub(r"\b(gtx|rtx)(?=\d)", r"\1 ", _MAKERS.sub("", name))
    name = re.sub(r"(?<=\d)(ti|super)\b", r" \1", name)
    name = " ".join(name.split())
    max_q = _MAX_Q.fullmatch(name)
    return max_q[1] if max_q else name
