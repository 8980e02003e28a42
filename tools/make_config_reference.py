#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write the table of docs/CONFIG.md from that in d2_memfit/config/keys.py and the techniques.

tools/make_config_reference.py
"""

import re
from pathlib import Path

from pages import markdown_table, write_section

from d2_memfit.config.keys import all_keys

CONFIG_MD = Path(__file__).resolve().parents[1] / "docs" / "CONFIG.md"
TOOL = "make_config_reference.py"


def reference() -> str:
    """The table of docs/CONFIG.md."""
    rows = [
        (f"`{key.name}`", _escaped(key.check.what), f"`{key.default!r}`", _escaped(key.text))
        for key in all_keys()
    ]
    return markdown_table(["key", "values", "default", "what it does"], rows)


def _escaped(text: str) -> str:
    return re.sub(r"([|*<])", r"\\\1", text)  # these have a meaning in Markdown


if __name__ == "__main__":
    write_section(CONFIG_MD, "keys", TOOL, reference())
