# Copyright (c) the d2_memfit developers.
"""One-line explanations of errors in a model: what, where, and what to do."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

from ..common.errors import ConfigError, MemfitError, one_line

__all__ = ["one_line_errors"]

_NOT_THE_USERS = {
    *("d2_memfit", "detectron2", "fvcore", "iopath", "numpy", "omegaconf", "scipy"),
    *("torch", "torchvision", *getattr(sys, "stdlib_module_names", ())),  # from Python 3.10 on
}

# Errors about what a training mapper adds to a batch: fields of Instances, keys, other masks.
_LACKS_LABELS = r"Cannot find field|'(PolygonMasks|BitMasks)' object has no attribute"
_NEEDS_GPU = (
    r"(?i:cuda|nvidia|not compiled|not (implemented|supported) (on|for) .*cpu)|(?<!\w)_C(?!\w)"
)


@contextmanager
def one_line_errors(
    assume: Callable[[], Iterable[str]] = tuple, in_evaluation: bool = False
) -> Iterator[None]:
    """While open, turn an error in a model into one line.

    Args:
        assume: gives lines about assumptions, which may be the cause.
        in_evaluation: whether the model runs in an evaluation, which a job may leave out.

    Raises:
        ConfigError: a model cannot be built, or does not run. The text names the error, the last
            place in the user's own code, and what to do.
    """
    try:
        yield
    except MemfitError:
        raise
    except Exception as e:
        message = one_line(e) if "Original Traceback" in str(e) else str(e)  # of a loader's worker
        text = next((line.strip() for line in message.splitlines() if line.strip()), "")
        error = f"{type(e).__name__}: {text}" if text else type(e).__name__
        assumed: list[str] = []
        with suppress(Exception):  # it may be the call that failed
            assumed += assume()
        leave_out = '. DATASETS.TEST "()" leaves evaluation out' if in_evaluation else ""
        where = " in evaluation" if in_evaluation else ""
        what = f"the model of this job does not run{where} ({error}, in {_place(e)})"
        causes = "".join(f". Assumed: {line}" for line in assumed)
        failure = ConfigError(f"{what}. {_advice(e)}{leave_out}{causes}")
        failure.what = what
        raise failure from e


def _place(error: Exception) -> str:
    """The last frame in code that is not PyTorch's, Detectron2's or ours; else the last frame."""
    frames = list(walk_tb(error.__traceback__))
    own = [frame for frame in frames if _is_the_users(frame[0].f_globals)]
    frame, line = (own or frames)[-1]
    file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{file}:{line} in {frame.f_code.co_name}"


def _is_the_users(names: dict[str, Any]) -> bool:
    name = names.get("__name__") or ""
    return name.partition(".")[0] not in _NOT_THE_USERS or name.startswith("detectron2.projects.")


def _advice(error: Exception) -> str:
    lacks_key = isinstance(error, KeyError) and error.args and isinstance(error.args[0], str)
    if lacks_key or re.search(_LACKS_LABELS, str(error)):
        return (
            "If the project's training mapper adds this to a batch, name the trainer that uses the "
            "mapper, with --trainer MODULE:CLASS, or give a batch, with --batch MODULE:FUNCTION. "
            "If the mapper reads it from the dataset, the dataset must exist"
        )
    if isinstance(error, (OSError, ModuleNotFoundError)):
        return "The job needs a file or a library before its first step: put it there"
    if re.search(_NEEDS_GPU, str(error)):
        return (
            "It needs a GPU or an operator that is not compiled here: build the project's "
            "operators, or measure on a GPU, with --probe"
        )
    return (
        "If the project's own training runs in this environment, its batch differs: give one, with "
        "--batch MODULE:FUNCTION; or measure on a GPU, with --probe"
    )
