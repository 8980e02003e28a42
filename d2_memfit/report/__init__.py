"""What a run has left behind, and what dry runs say, for people to look at."""

from .page import Bar, Chart, Page, Tensor, write_page
from .plots import write_html, write_png
from .run import Run, read_run

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
