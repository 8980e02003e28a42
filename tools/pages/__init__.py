# Copyright (c) the d2_memfit developers.
"""Tables, and sections of pages that a tool writes, between two comments that name both."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def section(page: Path, name: str, tool: str) -> str:
    """The text of a section, without empty lines around it.

    Raises:
        ValueError: the page does not have the section once.
    """
    return _split(page.read_text(), name, tool)[1].strip()


def with_section(page: str, name: str, tool: str, text: str) -> str:
    """The text of a page with another text in a section.

    Raises:
        ValueError: the page does not have the section once.
    """
    before, _, after = _split(page, name, tool)
    return f"{before}\n{text.strip()}\n{after}"


def write_section(page: Path, name: str, tool: str, text: str) -> None:
    """Put a text into a section of a page, as :func:`with_section`."""
    page.write_text(with_section(page.read_text(), name, tool, text))


def _split(page: str, name: str, tool: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name}: written by tools/{tool} -->\n", f"\n<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have {begin.strip()} and {end.strip()} once each")
    before, rest = page.split(begin)
    old, after = rest.split(end)
    return before + begin, old, end + after
