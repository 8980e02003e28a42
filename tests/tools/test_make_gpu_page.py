# Copyright (c) the d2_memfit developers.
import json

import make_gpu_page
import pytest

from d2_memfit.errors import ConfigError

RESULTS = {
    "date": "2026-11-22",
    "minutes": 8,
    "errors": {"plain": "there was no time left"},
    "machine": [{"card": "Some Card", "rehearsal": False, "total_gb": 5.79, "pytorch": "2.14.1"}],
    "zoo": [
        {
            **{"config": "COCO-Detection/rpn_R_50_FPN_1x", "images": 2},
            **{"training_estimated_gb": 2.0, "training_gb": 1.9, "training_error": 2 / 1.9 - 1},
        },
        {"config": "Misc/cascade_mask_rcnn_R_50_FPN_3x", "error": "MemfitError: it needs 6.1 GB"},
    ],
}


def test_the_page_is_up_to_date():
    page = make_gpu_page.page(make_gpu_page.measured(make_gpu_page.FOLDER))
    assert make_gpu_page.PAGE.read_text() == page, "run python tools/make_gpu_page.py"


def test_without_files_it_says_so(tmp_path):
    assert make_gpu_page.page(make_gpu_page.measured(tmp_path)).endswith("No card measured yet.\n")


def test_each_file_has_a_part_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(make_gpu_page, "FOLDER", tmp_path)
    monkeypatch.setattr(make_gpu_page, "PAGE", tmp_path / "GPU.md")
    (tmp_path / "some_card.json").write_text(json.dumps(RESULTS))
    make_gpu_page.main()
    page = (tmp_path / "GPU.md").read_text()
    assert "## Some Card\n\n5.79 GB. PyTorch 2.14.1. 2026-11-22." in page
    assert "+5.3%" in page
    assert "it needs 6.1 GB" in page
    assert "Not measured to the end: plain (there was no time left)." in page
    assert "![some_card](gpu/some_card.png)" in page
    assert (tmp_path / "some_card.png").read_bytes().startswith(b"\x89PNG")


def test_a_rehearsal_is_no_card(tmp_path):
    machine = [{**RESULTS["machine"][0], "rehearsal": True}]
    (tmp_path / "x86_64.json").write_text(json.dumps({**RESULTS, "machine": machine}))
    with pytest.raises(ConfigError, match=r"x86_64\.json is of a rehearsal on a CPU"):
        make_gpu_page.measured(tmp_path)
