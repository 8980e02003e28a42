# Copyright (c) the d2_memfit developers.
import pytest

from d2_memfit.config.cards import CARDS, card_name, preset_of_card
from d2_memfit.config.presets import PRESETS
from d2_memfit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("6GB", "6GB"),
        ("6", "6GB"),
        (" 6 gib", "6GB"),
        ("gtx 1650", "4GB"),
        ("RTX 3060", "12GB"),
        ("rtx_3060", "12GB"),
        ("RTX 3060 Laptop", "6GB"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "6GB"),
        ("RTX3060Ti", "8GB"),
        ("Tesla T4", "16GB"),
        ("RTX 2080 SUPER", "8GB"),
        ("V100-SXM2-32GB", "32GB"),
        ("RTX 4060 Ti 16GB", "16GB"),
        ("RTX 3050 6GB", "6GB"),
        ("NVIDIA GeForce GTX 1650 Ti with Max-Q Design", "4GB"),
        ("RTX 2060 Max-Q", "6GB"),
    ],
)
def test_a_card_is_named_by_its_size_or_as_people_write_it(text, preset):
    assert preset_of_card(text) == preset


@pytest.mark.parametrize(
    "text", ["", "7GB", "RTX 3061", "Radeon RX 580", "six", "GTX 1060 3GB", "RTX 3060 Max-Q"]
)
def test_others_are_refused_with_the_nearest(text):
    with pytest.raises(ConfigError, match=r"--card: .* is not known"):
        preset_of_card(text)


def test_each_card_has_a_preset_and_the_name_that_is_looked_up():
    without = {f"{card['GB']}GB" for card in CARDS.values()} - PRESETS.keys()
    assert not without, f"cards.csv has {without}, PRESETS of config/presets.py does not"
    assert all(card_name(name) == name for name in CARDS)
