# Copyright (c) the d2_memfit developers.
import json

import make_gpu_page
import pytest
from pages import markers, section

from d2_memfit.errors import ConfigError

MACHINE = {"stage": "measured", "item": "machine/", "card": "Some Card", "rehearsal": False}
MACHINE |= {"memory_mb": 5929, "pytorch": "2.14.1", "date": "2026-11-22"}
RECORDS = [
    MACHINE,
    {"stage": "expected", "item": "zoo/COCO-Detection/rpn_R_50_FPN_1x", "allocated_gb": 2.0},
    {"stage": "measured", "item": "zoo/COCO-Detection/rpn_R_50_FPN_1x", "allocated_gb": 1.9},
    {"stage": "measured", "item": "zoo/Misc/cascade_mask_rcnn_R_50_FPN_3x"}
    | {"error": "OutOfMemoryError: it needs more"},
]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_page_is_up_to_date():
    text = make_gpu_page.text(make_gpu_page.measured(make_gpu_page.FOLDER))
    of_page = section(make_gpu_page.PAGE, "measured", "make_gpu_page.py")
    assert of_page == text.strip(), "run python tools/make_gpu_page.py"


def test_without_files_it_says_so(tmp_path):
    assert "**No card has been measured yet**" in make_gpu_page.text({})


def test_each_file_has_a_part_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(make_gpu_page, "FOLDER", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("".join(markers("measured", "make_gpu_page.py")))
    monkeypatch.setattr(make_gpu_page, "PAGE", page)
    write(tmp_path / "some_card.jsonl", RECORDS)
    make_gpu_page.main()
    text = page.read_text()
    for said_without_a_card in ("No card has been measured", "without a card", "No CUDA kernel"):
        assert said_without_a_card in make_gpu_page.text({})
        assert said_without_a_card not in text
    assert "## Some Card\n\n5929 MB, PyTorch 2.14.1, 2026-11-22." in text
    assert "1.05" in text
    assert "OutOfMemoryError: it needs more" in text
    assert "![some_card](gpu/some_card.png)" in text
    assert (tmp_path / "some_card.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [1, 3])
def test_what_was_not_measured_leaves_its_panel_empty(number, tmp_path):
    write(tmp_path / "some_card.jsonl", RECORDS[:number])
    results = make_gpu_page.measured(tmp_path)["some_card"]
    make_gpu_page.draw(results, tmp_path / "some_card.png")
    assert (tmp_path / "some_card.png").read_bytes().startswith(b"\x89PNG")


def test_a_rehearsal_is_no_card(tmp_path):
    write(tmp_path / "x86_64.jsonl", [{**MACHINE, "rehearsal": True}])
    with pytest.raises(ConfigError, match=r"x86_64\.jsonl is of a rehearsal on a CPU"):
        make_gpu_page.measured(tmp_path)
