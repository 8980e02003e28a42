# Copyright (c) the d2_memfit developers.
"""Sections of pages that tools write."""

import pytest
from pages import section, write_section

PAGE = """# A page

<!-- jobs: written by tools/make_jobs.py -->

old

<!-- end of jobs -->

The end.
"""


def test_only_the_section_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert section(page, "jobs", "make_jobs.py") == "old"
    write_section(page, "jobs", "make_jobs.py", "new\n\n| row |\n")
    assert page.read_text() == PAGE.replace("old", "new\n\n| row |")
    assert section(page, "jobs", "make_jobs.py") == "new\n\n| row |"


@pytest.mark.parametrize("text", ["# A page\n", PAGE + PAGE, PAGE.replace("end of jobs", "end")])
def test_a_page_without_the_section_is_not_changed(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="once each"):
        write_section(page, "jobs", "make_jobs.py", "new")
    assert page.read_text() == text
