# Copyright (c) the d2_memfit developers.
import make_pictures
import pytest
from browser import CHROMIUM
from pictures import owners
from PIL import Image
from tiny import ROOT


def test_all_pictures_are_shown_somewhere():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text() for page in pages)
    missing = [file for _, file in make_pictures.PICTURES.values() if f"{file})" not in text]
    assert not missing


def test_what_is_known_by_no_group_is_drawn_too():
    sizes = owners.grouped([("parameters", 1.0), ("optimizer", 2.0), ("something new", 4.0)])
    assert sizes == {owners.STATES: 3.0, owners.OTHER: 4.0}
    assert set(sizes) < set(owners.GROUPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", make_pictures.PICTURES)
def test_they_are_drawn_anew(name, tmp_path):
    draw, file = make_pictures.PICTURES[name]
    if name.endswith("page") and CHROMIUM is None:
        pytest.skip("there is no Chromium to open pages with")
    draw(tmp_path / file)
    if file.endswith(".png"):
        committed = Image.open(ROOT / "docs" / file)
        assert Image.open(tmp_path / file).size == committed.size
