# Copyright (c) the d2_memfit developers.
"""The package and its tests stay small: lines of code without blank ones, comments, docstrings."""

import ast

import pytest
from tiny import ROOT

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text):
    described = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            described |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    return sum(1 for i, line in lines if line and line[0] != "#" and i not in described)


@pytest.mark.parametrize(("folder", "most"), [("d2_memfit", 14_000), ("tests", 16_500)])
def test_a_folder_has_at_most_so_many_lines(folder, most):
    """The goals are 13,000 lines of package, and 14,000 of tests."""
    assert sum(lines_of_code(f.read_text()) for f in (ROOT / folder).rglob("*.py")) <= most


def test_only_code_counts():
    text = '"""Text"""\n# remark\nimport ast\n\ndef f():\n    """Te\n\nxt"""\n    return 1\n'
    assert lines_of_code(text) == 3
