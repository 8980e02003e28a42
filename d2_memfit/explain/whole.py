# Copyright (c) the d2_memfit developers.
"""A whole log, explained."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from ..errors import ConfigError, one_line
from .explanation import ExplainedRun, Prediction, explain_run, predict_run
from .rebuild import Help
from .records import LoggedRun
from .sources import read_runs

# Keys that neither memory nor time depends on.
_NO_MEMORY = (
    *("OUTPUT_DIR", "WEIGHTS", "BASE_LR", "MAX_ITER", "STEPS", "CHECKPOINT_PERIOD", "SEED"),
    *("EVAL_PERIOD", "WARMUP_ITERS", "WARMUP_FACTOR", "GAMMA", "TEST"),
)

_Path = Union[str, "os.PathLike[str]"]

__all__ = ["Explained", "Explanation", "Predictions", "explain", "explain_each"]


@dataclass(frozen=True)
class Explanation:
    """The runs of a log, in order."""

    runs: tuple[ExplainedRun, ...]


class Explained(NamedTuple):
    """A run as it was logged, as it was predicted, and what both tell."""

    run: LoggedRun
    prediction: Optional[Prediction]
    told: ExplainedRun


def explain(path: _Path, help: Optional[Help] = None) -> Explanation:
    """Explain the trainings of a log: what they needed, what is predicted, how they ended.

    Args:
        path: a ``log.txt``, the output of a console, a notebook, or an ``OUTPUT_DIR``.
        help: what the log does not say.

    Raises:
        DataError: the file cannot be read, or shows no training with Detectron2.
    """
    return Explanation(tuple(explained.told for explained in explain_each(path, help or Help())))


def explain_each(path: _Path, help: Help) -> Iterator[Explained]:
    """Explain the trainings of a log one by one. Equal jobs are predicted once."""
    explained = Predictions(help)
    for i, run in enumerate(read_runs(path), 1):
        yield explained(f"run {i}", run)


class Predictions:
    """Explains runs, and predicts equal jobs once."""

    def __init__(self, help: Help) -> None:
        self._help = help
        self._known: dict[str, tuple[Optional[Prediction], str]] = {}

    def __call__(self, name: str, run: LoggedRun) -> Explained:
        key = _key_of(run)
        if key not in self._known:
            try:
                self._known[key] = predict_run(run, self._help), ""
            except ConfigError as e:
                self._known[key] = None, _why_not(e)
        prediction, why_not = self._known[key]
        return Explained(run, prediction, explain_run(name, run, prediction, why_not))


def _why_not(error: ConfigError) -> str:
    """Why nothing is predicted, without advice for other commands."""
    text = one_line(error)
    if missing := re.search(r"No object named '(.*?)' found in '(\w+)' registry", text):
        return f"{missing[1]}, of {missing[2]}, is not Detectron2's: its code is not here"
    return re.sub(r"^(the model of this job does not run \(.*?, in [^)]*\))\. .*", r"\1", text)


def _key_of(run: LoggedRun) -> str:
    """The same for runs whose predictions are the same."""
    lines = rf"^ *(?:\w+\.)*({'|'.join(_NO_MEMORY)}): .*$"
    config = re.sub(lines, "", run.config_text, flags=re.MULTILINE)
    of_card = [run.gpus, run.software.get("torch"), run.ranks]
    of_data = [run.augmentations, run.images, run.objects, run.overrides]
    of_file = [run.zoo_config, run.config_file]
    return str([config, of_card, of_data, of_file])
