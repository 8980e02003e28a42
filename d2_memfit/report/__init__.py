# Copyright (c) the d2_memfit developers.
"""Reports of runs and dry runs, as pictures and pages."""

from .page import Bar, Chart, Page, Tensor, write_page
from .plots import write_html, write_png
from .records import Run, read_run

__all__ = [
    "Bar",
    "Chart",
    "Page",
    "Run",
    "Tensor",
    "read_run",
    "write_html",
    "write_page",
    "write_png",
]
