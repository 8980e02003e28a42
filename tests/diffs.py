# Copyright (c) the d2_memfit developers.
"""Diffs that documentation shows, against the files that they are of."""

import importlib.util
import re
from pathlib import Path
from typing import Optional


def diffs_in(markdown: Path) -> list[str]:
    """The text of each block of a diff."""
    return re.findall(r"^```diff\n(.*?)^```$", markdown.read_text(), re.DOTALL | re.MULTILINE)


def hunks(diff: str) -> list[tuple[str, str]]:
    """What each hunk finds, and what it puts there. Lines with @@ separate them."""
    result = []
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        after = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        if before != after:
            result.append((before, after))
    return result


def apply_diff(diff: str, text: str) -> str:
    for old, new in hunks(diff):
        assert text.count(old) == 1, f"{text.count(old)} times in the file:\n{old}"
        text = text.replace(old, new)
    return text


def of_detectron2(path: str) -> Optional[Path]:
    """A file of Detectron2's repository that is not in its package: there is one where Detectron2
    was installed in place.
    """
    package = Path(importlib.util.find_spec("detectron2").origin).resolve().parent
    file = package.parent / path
    return file if file.is_file() else None
