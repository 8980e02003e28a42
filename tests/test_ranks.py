# Copyright (c) the d2_memfit developers.
"""The ranks that tests run on."""

import sys

import pytest
from ranks import Ranks

pytestmark = pytest.mark.slow


def double(rank, number):
    return rank, 2 * number


def test_functions_of_tests_are_found_beside_another_package_of_this_name(tmp_path, monkeypatch):
    """Such as Detectron2's own tests, where its checkout is on the path."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    ranks = Ranks(2)
    try:
        assert ranks.run(double, 4) == [(0, 8), (1, 8)]
    finally:
        ranks.stop()
