# Copyright (c) the d2_memfit developers.
"""Results in lines of JSON, so that an interrupted race can continue."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

FILE_NAME = "results.jsonl"


class Results:
    """The lines of a file; each belongs to a section of the race.

    Args:
        path: read if it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = [json.loads(x) for x in path.open()] if path.exists() else []

    def find(self, section: str, **keys: Any) -> Optional[dict[str, Any]]:
        """The line of the section in which all keys have these values."""
        for line in self.of(section):
            if all(line[key] == value for key, value in keys.items()):
                return line
        return None

    def of(self, section: str) -> Iterator[dict[str, Any]]:
        return (line for line in self._lines if line["section"] == section)

    def times(self) -> list[dict[str, Any]]:
        """Times of the last run, in which all sides took turns."""
        lines = list(self.of("time"))
        return [line for line in lines if line["run"] == lines[-1]["run"]]

    def add(self, section: str, **values: Any) -> dict[str, Any]:
        line = {"section": section, **values}
        self._lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return line
