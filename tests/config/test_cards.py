# Copyright (c) the d2_memfit developers.
"""Cards as people write them, and the table against what is known of generations."""

import pytest

from d2_memfit.common.errors import ConfigError
from d2_memfit.config.cards import CARDS, PRESETS, cards_named, find_card, settings_of_card

SPELLINGS = {
    "GTX960 4GB": "gtx_960_4gb",
    "NVIDIA GeForce GTX 1060 3GB": "gtx_1060_3gb",
    "1080ti": "gtx_1080_ti",
    "Tesla V100-SXM2-32GB": "v100_32gb",
    "NVIDIA GeForce GTX 1650 Ti with Max-Q Design": "gtx_1650_ti",
    "RTX 2060 Max-Q": "rtx_2060",
    "Tesla T4": "t4",
    "NVIDIA GeForce RTX 3060 Laptop GPU": "rtx_3060_laptop",
    "RTX-3060-8GB": "rtx_3060_8gb",
    "NVIDIA GeForce RTX 3050 6GB Laptop GPU": "rtx_3050_laptop_6gb",
    "A100 80GB PCIe": "a100_80gb",
    "4060Ti 16 GB": "rtx_4060_ti_16gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "H100 PCIe": "h100",
    "GTX 1650 Laptop GPU": "gtx_1650",
    "NVIDIA GeForce GTX 1060 3GB Laptop GPU": "gtx_1060_3gb",
    "GTX 1660 Ti Laptop": "gtx_1660_ti",
    "RTX 2060 Laptop GPU": "rtx_2060",
    "NVIDIA GeForce RTX 2080 Super Laptop GPU": "rtx_2080_super",
    "5090 laptop": "rtx_5090_laptop",
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx_pro_6000",
    "Jetson Orin Nano 8GB": "jetson_orin_nano",
    "NVIDIA Jetson AGX Orin Developer Kit": "jetson_agx_orin",
    "DGX Spark": "dgx_spark",
}


@pytest.mark.parametrize(("text", "device"), SPELLINGS.items())
def test_a_card_is_understood_as_people_and_pytorch_write_it(text, device):
    for written in (text, text.lower(), text.upper(), f"  {text} "):
        card = find_card(written)
        assert card is CARDS[device]
        assert settings_of_card(written) == {
            "MEMFIT.PRESET": "",
            "MEMFIT.BUDGET_GB": card.budget_gb,
        }


@pytest.mark.parametrize("text", ["6GB", "6", " 6 gib", "6 g"])
def test_a_size_alone_is_a_preset(text):
    assert settings_of_card(text) == {"MEMFIT.PRESET": "6GB", "MEMFIT.BUDGET_GB": None}
    assert find_card(text) is None


@pytest.mark.parametrize(
    "text", ["", "RTX 3061", "A100 40GB MIG 1g.5gb", "RTX 3060 7GB", "Apple M3 16GB"]
)
def test_others_are_refused_with_what_to_type(prose, text):
    with pytest.raises(ConfigError, match=f"'{text}'") as e:
        settings_of_card(text)
    prose(str(e.value))


def test_the_table_has_a_hundred_cards_and_each_name_once():
    assert len({card.name for card in CARDS.values()}) >= 100
    assert all(find_card(device) is card for device, card in CARDS.items())
    for card in CARDS.values():
        sizes = [one.memory_gb for one in cards_named(card.name)]
        assert len(sizes) == len(set(sizes))


def test_a_process_can_take_what_the_budget_says():
    for device, card in CARDS.items():
        reserved = 1 - card.usable_gb / card.memory_gb
        assert 0.004 < reserved < (0.26 if card.remarks == "unified" else 0.22), card
        assert 0.05 < card.usable_gb - card.budget_gb < 0.21, card
        preset = PRESETS.get(f"{card.memory_gb:g}GB")
        # Old cards whose ECC takes a share of little memory, and memory that the CPU has too.
        has_less = card.remarks == "unified" or device in ("m40", "m60", "p4")
        assert preset is None or (preset > card.usable_gb) == has_less, card
