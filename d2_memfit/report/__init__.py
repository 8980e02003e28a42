"""What a run has left behind, for people to look at."""

from .plots import write_html, write_png
from .run import Run, read_run

__all__ = ["Run", "read_run", "write_html", "write_png"]
