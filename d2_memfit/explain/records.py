# Copyright (c) the d2_memfit developers.
"""The trainings that a log of Detectron2 shows.

A log is read message by message, so it may be of any size. Nobody vouches for its text: lines and
numbers have a limited length, and control characters are left out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from ..common.errors import DataError

__all__ = ["CONTEXT_MIB", "ERROR_ALONE", "LoggedRun", "Oom", "clean", "read_parts"]

# What the context, kernels and other libraries of one process take, at least and at most:
# planner/device has the sources.
CONTEXT_MIB = (287.0, 426.0 + 380.0)
ERROR_ALONE = "only the error is known: whether iterations ran before it is not"  # a note

_LINE, _MESSAGE = 10_000, 10_000  # characters, a longer line is cut; lines of a message

_COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_NOT_SHOWN = re.compile(r"[^\w !-~]+")  # what is neither a letter of any script nor in ASCII
# [12/30 02:18:09] d2.utils.events INFO: text, or [01/06 11:33:38 d2.utils.events]: text
# In a pasted text, colours may have lost the escape character.
_HEAD = re.compile(r"\[\d\d/\d\d \d\d:\d\d:\d\d(?: [\w.-]+)?\](?: [\w.-]+ [A-Z]+)?: ?(?:\[0m)?")
_ITERATION = re.compile(r"\biter: (\d{1,12})(?: |$)")
_SECONDS = re.compile(r" time: (\d{1,9}\.\d{1,9})")
_PEAK = re.compile(r"max_mem: (\d{1,9})M")
_DIVERGED = re.compile(r"(?i)FloatingPointError|\bdiverged\b|\btotal_loss: [+-]?(?:nan|inf)")

_FACT = re.compile(  # the beginning of a line that tells fields of a run, or its software
    r"Rank of current process: \d+\. World size: (?P<ranks>\d{1,6})"
    r"|Command line arguments: .*?config_file='(?P<config_file>[^']*)'"
    r"|(?:  MAX_ITER:|[\w.]{0,99}max_iter *=) *(?P<max_iter>\d{1,12})"
    r"|[\w\[\] ]{0,99}s used in training: (?P<augmentations>.*)"
    r"|(?:Removed [^.]{1,99}\. |Serializing )(?P<images>\d{1,12}) (?:images left|elements)"
    # The row of the total, or of the only class
    r"|\|(?: *total *|[^|]*(?=\| *\d+ *\|$))\| *(?P<objects>\d{1,12})"
    r"|Starting training from iteration (?P<start_iter>\d{1,12})"
    r"|PyTorch +(?P<torch>\d\S{0,99})"
)
_GPU = re.compile(  # in "Environment info", of nvidia-smi -L, of nvidia-smi
    r"GPU [\d,]{1,99}(?:: | {2,})(\S.{0,99}?)(?: \((?:arch=|UUID).*)?$|"
    r"\| +\d+ +((?:NVIDIA|Tesla|GeForce|Quadro|GRID|TITAN|RTX)(?: [^\s|.]+)*) +(?:On|Off|N/A) "
)
_OF_PROCESS = ("gpus", "torch", "ranks", "config_file", "config_text")

_FAILURE = re.compile(  # the beginning of a line about an error
    r"(?:\[\w+\]: *)?(?:(?P<error>[\w.]{0,99}(?:Error|Exception|Exit)(?::|$))"
    r"|Killed\b|Bus error|ERROR: Unexpected bus error|[\w./-]{1,99}: line \d+: |slurmstepd: "
    r"|  traceback : "
    r"|Out of memory in the (?=.*Now training stops$))"  # of d2_memfit
)
_OOM = re.compile(
    r"[A-Z]{3,4} (?:\w+ )?(?:error: )?out of memory|ALLOC(?:ATION)?_FAILED|calling `cublasCreate"
    r"|find a valid cuDNN algorithm|find an engine to execute"
)
_HOST_OOM = re.compile(
    r"\bKilled\b|killed by signal|oom[-_]kill|SIGKILL|\b(?:_Array)?MemoryError|bad_alloc"
    r"|DefaultCPUAllocator|Cannot allocate memory|[Bb]us error|nsufficient shared memory"
    r"|Out of memory in the .*: could not create a "  # of d2_memfit, which knows oneDNN's errors
)
# In the traceback of an evaluation; the last one is DefaultPredictor's.
_EVALUATES = ("inference_on_dataset", "_do_eval", "self.model([inputs])")
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?) ([GMKb])(?:iB|B|ytes)\b"
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024, "b": 1 / 2**20}
_OOM_NUMBERS = {  # PyTorch up to 2.0; 2.1 (which writes capacty) and later
    "tried_mib": rf"[Tt]ried to allocate {_NUMBER}",
    "total_mib": rf"{_NUMBER} total capacity|total capaci?ty of {_NUMBER}",
    "free_mib": rf"{_NUMBER} free;|of which {_NUMBER} is free",
    "allocated_mib": rf"{_NUMBER} already allocated|{_NUMBER} is allocated by PyTorch",
    "reserved_mib": rf"{_NUMBER} reserved in total",
    "unallocated_mib": rf"{_NUMBER} is reserved by PyTorch but unallocated",
    "process_mib": rf"this process has {_NUMBER} memory in use",
}


@dataclass
class Oom:
    """An out-of-memory error. Memory is in MiB; None is not known.

    Attributes:
        case: "at once", "after some iterations", "evaluation" or "host", as in
            docs/OUT_OF_MEMORY.md.
        iteration: that of the error, or the last that was logged before.
        tried_mib: what was asked for.
        total_mib, free_mib: the card's memory, and what is free of it.
        allocated_mib, reserved_mib: what tensors take, and what PyTorch's allocator holds.
        process_mib: all that the process holds, with its context.
        held_by_others_mib: what other processes hold, at least.
        fits: whether the job fits this card when nobody else uses it.
    """

    case: str
    iteration: Optional[int] = None
    tried_mib: Optional[float] = None
    total_mib: Optional[float] = None
    free_mib: Optional[float] = None
    allocated_mib: Optional[float] = None
    reserved_mib: Optional[float] = None
    process_mib: Optional[float] = None
    held_by_others_mib: Optional[float] = None
    fits: Optional[bool] = None

    def __post_init__(self) -> None:
        own = self.process_mib
        if own is None and self.reserved_mib is not None:
            own = self.reserved_mib + CONTEXT_MIB[0]
        if own is not None and self.total_mib is not None and self.free_mib is not None:
            self.held_by_others_mib = max(self.total_mib - self.free_mib - own, 0.0)


@dataclass
class LoggedRun:
    """What a log says of one training. None or "" is not known.

    Attributes:
        gpus: the names of the cards, each once.
        torch: version of PyTorch.
        ranks: processes that train.
        config_text: the full config as YAML.
        zoo_config, overrides: the config file that a notebook's code names, and the keys to which
            it gives values that can be read without running it.
        augmentations: those of training, as they are printed.
        images, objects: of the training set, in what is left of it.
        start_iter, max_iter: of the schedule.
        iteration, seconds, peak_mib: the last that was logged, seconds of those that were, and the
            largest peak of allocated memory in MiB.
        oom: the out-of-memory error that ended the run.
        error: the last line of another error that ended the run.
        losses: the line of the last iteration.
        is_finished: whether the last iteration was logged.
        notes: doubts about what is said above.
    """

    gpus: list[str] = field(default_factory=list)
    torch: str = ""
    ranks: Optional[int] = None
    config_file: str = ""
    config_text: str = ""
    zoo_config: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    augmentations: str = ""
    images: Optional[int] = None
    objects: Optional[int] = None
    start_iter: Optional[int] = None
    max_iter: Optional[int] = None
    iteration: Optional[int] = None
    seconds: list[float] = field(default_factory=list)
    peak_mib: Optional[float] = None
    oom: Optional[Oom] = None
    error: str = ""
    losses: str = ""
    is_finished: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def has_started(self) -> bool:
        """Whether it trains, or ran out of memory before."""
        return any(part is not None for part in (self.start_iter, self.iteration, self.oom))

    @property
    def is_lazy(self) -> bool:
        """Whether the config is a LazyConfig, a file of Python."""
        return self.config_file.endswith(".py")

    @property
    def ended(self) -> str:
        """How it ended: "out of memory", "diverged", "finished", "error" or "running"."""
        if self.oom is not None:
            return "out of memory"
        if _DIVERGED.search(f"{self.losses}\n{self.error}"):
            return "diverged"
        return "finished" if self.is_finished else "error" if self.error else "running"


def read_parts(parts: Iterable[tuple[dict[str, Any], Iterable[str]]], name: str) -> list[LoggedRun]:
    """The trainings of a log in several parts, in order.

    Args:
        parts: the lines of each part, after the fields of the runs that start in it.
        name: what errors call the log.

    Raises:
        DataError: the lines show no training with Detectron2.
    """
    runs = [LoggedRun()]
    for settings, lines in parts:
        for message in _messages(lines):
            first = message[0]
            begins = first == "Model:" or first.startswith("Starting training from iteration")
            if first.startswith("Rank of current process"):
                runs.append(LoggedRun())
            elif begins and runs[-1].has_started:
                runs.append(LoggedRun(**{key: getattr(runs[-1], key) for key in _OF_PROCESS}))
            run = runs[-1]
            if not run.has_started:
                vars(run).update(settings)
            run.error = "" if begins else run.error  # it did not end this run
            _take(run, message)
    trainings = [run for run in runs if run.has_started]
    if not trainings:
        why = f"it has no line about an iteration. {runs[-1].error:.200}".rstrip()
        raise DataError(f"{name} shows no training with Detectron2: {why}")
    return trainings


def _messages(lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines of each message, which begins with a date."""
    message = list[str]()
    for line in lines:
        text = clean(line)
        head = _HEAD.search(text, 0, 150)
        if message and (head or len(message) >= _MESSAGE):
            yield message
            message = []
        message.append(text[head.end() :] if head else text)
    if message:
        yield message


def clean(line: str) -> str:
    """A line without colours, and without what a terminal would obey."""
    line = _COLOUR.sub("", line[:_LINE].rstrip())
    return line if line.isprintable() else _NOT_SHOWN.sub(" ", line)


def _take(run: LoggedRun, message: list[str]) -> None:
    """Note what a message says."""
    if message[0] == "Running with full config:":
        run.config_text = "\n".join(message[1:]).rstrip()
    evaluates = False
    for line in message:
        found = _ITERATION.search(line, 0, 1000) if "lr" in line else None
        if found and "max mem: " not in line:  # as maskrcnn-benchmark writes
            _take_iteration(run, int(found[1]), line)
        elif found := _FACT.match(line):
            _take_facts(run, found.groupdict(""))
        elif found := _FAILURE.match(line):
            _take_failure(run, line, evaluates, is_error=found["error"] is not None)
        elif not run.has_started and (found := _GPU.match(line)):
            run.gpus = list(dict.fromkeys([*run.gpus, found[1] or found[2]]))
        else:
            evaluates = evaluates or any(call in line for call in _EVALUATES)


def _take_iteration(run: LoggedRun, iteration: int, line: str) -> None:
    if run.oom and run.oom.iteration is None:  # hooks write a last line after an error
        run.oom.iteration = iteration
    elif run.oom and iteration > (run.oom.iteration or 0):
        run.oom = None  # training went on
    run.iteration, run.losses = iteration, line
    if time := _SECONDS.search(line):
        run.seconds.append(float(time[1]))
    if peak := _PEAK.search(line):
        run.peak_mib = max(run.peak_mib or 0.0, float(peak[1]))
    run.is_finished = run.max_iter is not None and iteration + 1 >= run.max_iter


def _take_facts(run: LoggedRun, facts: dict[str, str]) -> None:
    """Set fields that are not known yet: the first dataset is the one that trains."""
    for name, value in facts.items():
        if value and name == "max_iter":  # the full config comes after the file that it is made of
            run.max_iter = int(value)
        elif value and getattr(run, name) in (None, ""):
            setattr(run, name, int(value) if getattr(run, name) is None else value)


def _take_failure(run: LoggedRun, line: str, evaluates: bool, is_error: bool) -> None:
    found = (on_card := _OOM.search(line)) or _HOST_OOM.search(line)
    if found and run.oom is None:  # otherwise a console shows it again, or what came of it
        numbers: dict[str, Any] = {}
        for name, pattern in _OOM_NUMBERS.items():
            if number := re.search(pattern, line[found.start() :][:1000]):
                value, unit = filter(None, number.groups())
                numbers[name] = float(value) * _MIB[unit]
        if (unallocated := numbers.pop("unallocated_mib", None)) is not None:
            numbers["reserved_mib"] = numbers.get("allocated_mib", 0.0) + unallocated
        said = re.findall(r"of iteration (\d{1,12}) on rank", line)  # by d2_memfit
        iteration = int(said[0]) if said else None
        trained = ((iteration if said else run.iteration) or 0) > (run.start_iter or 0)
        case = "evaluation" if evaluates else "after some iterations" if trained else "at once"
        is_alone = case == "at once" and run.start_iter is None and not (run.config_text or said)
        run.notes += [ERROR_ALONE] if on_card and is_alone else []
        run.oom = Oom(case if on_card else "host", iteration, **numbers)
    elif is_error and not found and not (line.endswith(":") and run.error):
        run.error = line.strip()  # what ends with ":" says less: torchrun's ChildFailedError
