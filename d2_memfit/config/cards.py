# Copyright (c) the d2_memfit developers.
"""Memory that cards are sold with, by their names."""

import re

from ..common.checks import did_you_mean
from ..errors import ConfigError
from .presets import PRESETS

__all__ = ["CARDS", "card_name", "preset_of_card"]

# Nominal GB, not looked up card by card. Of a card with several sizes, it is that of most of them.
# A size after the name decides: "RTX 3050 6GB".
CARDS = {
    "gtx 1050 ti": 4,
    "gtx 1060": 6,
    "gtx 1070": 8,
    "gtx 1080": 8,
    "gtx 1080 ti": 11,
    "gtx 1650": 4,
    "gtx 1660": 6,
    "gtx 1660 super": 6,
    "gtx 1660 ti": 6,
    "rtx 2060": 6,
    "rtx 2060 super": 8,
    "rtx 2070": 8,
    "rtx 2070 super": 8,
    "rtx 2080": 8,
    "rtx 2080 super": 8,
    "rtx 2080 ti": 11,
    "rtx 3050": 8,
    "rtx 3050 laptop": 4,
    "rtx 3060": 12,
    "rtx 3060 laptop": 6,
    "rtx 3060 ti": 8,
    "rtx 3070": 8,
    "rtx 3070 laptop": 8,
    "rtx 3070 ti": 8,
    "rtx 3080": 10,
    "rtx 3080 laptop": 8,
    "rtx 3080 ti": 12,
    "rtx 3090": 24,
    "rtx 4050 laptop": 6,
    "rtx 4060": 8,
    "rtx 4060 laptop": 8,
    "rtx 4060 ti": 8,
    "rtx 4070": 12,
    "rtx 4070 laptop": 8,
    "rtx 4070 ti": 12,
    "rtx 4080": 16,
    "rtx 4080 laptop": 12,
    "rtx 4090": 24,
    "rtx 4090 laptop": 16,
    "rtx 5060": 8,
    "rtx 5060 laptop": 8,
    "rtx 5070": 12,
    "rtx 5080": 16,
    "rtx 5090": 32,
    "a10": 24,
    "a100": 40,
    "h100": 80,
    "l4": 24,
    "l40": 48,
    "p100": 16,
    "rtx a6000": 48,
    "t4": 16,
    "v100": 16,
}
_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|gpu|pcie|sxm\d?)\b")
_SIZE = re.compile(r"(?:^|.* )(\d+) ?(?:g|gb|gib)|(\d+)")


def preset_of_card(text: str) -> str:
    """The preset of a card that is written as 6GB, 6, RTX 3060 Laptop or "GeForce GTX 1060 3 GB".

    Raises:
        ConfigError: there is no such card. The message names the nearest ones.
    """
    name = card_name(text)
    preset = text
    if name in CARDS:
        preset = f"{CARDS[name]}GB"
    elif size := _SIZE.fullmatch(name):
        preset = f"{size[1] or size[2]}GB"
    if preset in PRESETS:
        return preset
    known = [*PRESETS, *(known.upper() for known in CARDS)]
    raise ConfigError(
        f"--card: {text!r} is not known{did_you_mean(name.upper(), known)}. There are "
        f"{', '.join(PRESETS)}, and names of NVIDIA's cards. For another size, --budget takes any "
        "number"
    )


def card_name(text: str) -> str:
    """A card's name as in :data:`CARDS`: "NVIDIA GeForce RTX3060 Laptop GPU" is rtx 3060 laptop."""
    name = re.sub(r"[^a-z0-9]+", " ", text.lower())
    name = re.sub(r"\b(gtx|rtx)(?=\d)", r"\1 ", _MAKERS.sub("", name))
    name = re.sub(r"(?<=\d)(ti|super)\b", r" \1", name)
    return " ".join(name.split())
