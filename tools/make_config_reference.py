#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write the table of docs/CONFIG.md from that in d2_memfit/config/keys.py and the techniques.

tools/make_config_reference.py
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pages import markdown_table, write_section

from d2_memfit.common.checks import Check
from d2_memfit.config.keys import KEYS, Key
from d2_memfit.techniques import TECHNIQUES

CONFIG_MD = Path(__file__).resolve().parents[1] / "docs" / "CONFIG.md"
TOOL = "make_config_reference.py"


def keys() -> Iterator[Key]:
    """All keys of d2_memfit."""
    yield from KEYS
    for _, technique in sorted(TECHNIQUES, key=lambda item: getattr(item[1], "key", "")):
        if hasattr(technique, "key"):
            text = (inspect.getdoc(technique) or "").partition("\n\nKey: ")[2].partition("\n\n")[0]
            text = f"{' '.join(text.split())} ({technique.tier})"
            check = technique.check_value
            if technique.off is None:
                check = Check(f"{check.what} or None", lambda value: value is None)
            yield Key(technique.key, technique.off, check, text)


def reference() -> str:
    """The table of docs/CONFIG.md."""
    rows = [
        (f"`{key.name}`", _escaped(key.check.what), f"`{key.default!r}`", _escaped(key.text))
        for key in keys()
    ]
    return markdown_table(["key", "values", "default", "what it does"], rows)


def _escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)  # these have a meaning in Markdown


if __name__ == "__main__":
    write_section(CONFIG_MD, "keys", TOOL, reference())
