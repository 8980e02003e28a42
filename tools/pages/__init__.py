# Copyright (c) the d2_memfit developers.
"""Sections of pages that a tool writes, between two comments that name the section and the tool."""

from pathlib import Path


def markers(name: str, tool: str) -> tuple[str, str]:
    """The comments around a section: ``<!-- jobs: written by tools/make_readme_table.py -->``."""
    return f"<!-- {name}: written by tools/{tool} -->\n", f"\n<!-- end of {name} -->"


def section(page: Path, name: str, tool: str) -> str:
    """The text of a section, without empty lines around it.

    Raises:
        ValueError: the page does not have the section once.
    """
    return _split(page, name, tool)[1].strip()


def write_section(page: Path, name: str, tool: str, text: str) -> None:
    """Put a text into a section of a page. The rest of the page stays.

    Raises:
        ValueError: the page does not have the section once.
    """
    begin, end = markers(name, tool)
    before, _, after = _split(page, name, tool)
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def _split(page: Path, name: str, tool: str) -> tuple[str, str, str]:
    begin, end = markers(name, tool)
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} must have {begin.strip()} and {end.strip()} once each")
    before, rest = text.split(begin)
    old, after = rest.split(end)
    return before, old, after
