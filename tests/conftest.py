# Copyright (c) the d2_memfit developers.
import gc
import itertools
import logging
import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

# PyTorch is not imported here: the process of `pytest -n` that only hands out tests needs none.

gc.disable()  # until all tests are imported: nothing of them is freed

if "PYTEST_XDIST_WORKER" in os.environ:  # the tests beside these need cores too
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # also for the processes that tests start

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell's job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = itertools.count()
_frozen = [0]  # numbers of modules
_ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow", re.MULTILINE)
_PROSE = Path(__file__).with_name("prose.txt")
_HEAD, *_entries = _PROSE.read_text().rstrip("\n").split("\n\n== ")
_SENTENCES = dict(entry.split("\n", 1) for entry in _entries)

_ROOT = Path(__file__).resolve().parents[1]
for folder in (*sorted(_ROOT.glob("projects/*")), _ROOT / "tools"):
    sys.path.insert(0, str(folder))  # scripts import what lies beside them


def pytest_addoption(parser):
    parser.addoption("--prose", action="store_true", help="write tests/prose.txt anew")


def pytest_ignore_collect(collection_path, config):
    """`make test` does not even import a file whose tests are all slow."""
    is_asked = collection_path.suffix == ".py" and "not slow" in config.option.markexpr
    return True if is_asked and _ALL_SLOW.search(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)  # of all tests, also of those that -k and -m leave out
def pytest_collection_modifyitems(config, items):
    """Which sentences no test asks for: those whose file is gone, or was collected whole."""
    names = {item.nodeid: "prose" in item.fixturenames for item in items}
    files = {name.partition("::")[0] for name in names if not any("::" in a for a in config.args)}
    config.unasked = [
        name
        for name, file in ((name, name.partition("::")[0]) for name in _SENTENCES)
        if not names.get(name) and (file in files or not (_ROOT / file).exists())
    ]
    if config.option.prose:
        items[:] = [item for item in items if names[item.nodeid]]


def pytest_sessionfinish(session, exitstatus):
    if session.config.option.prose and not exitstatus:
        asked = {n: s for n, s in sorted(_SENTENCES.items()) if n not in session.config.unasked}
        _PROSE.write_text("\n\n== ".join((_HEAD, *map("\n".join, asked.items()))) + "\n")


@pytest.fixture
def prose(request, tmp_path):
    """Compares whole sentences with those of tests/prose.txt, once in a test."""

    def compare(text, **places):
        for name, place in {"tmp_path": tmp_path, "root": _ROOT, **places}.items():
            text = text.replace(str(place), f"{{{name}}}")
        text = "\n".join(map(str.rstrip, text.strip().splitlines()))
        written = _SENTENCES.get(request.node.nodeid, "")
        if not re.fullmatch(".*".join(map(re.escape, written.split("[...]"))), text, re.DOTALL):
            if not request.config.option.prose:
                assert text == written, "if these words are meant: make prose"
            _SENTENCES[request.node.nodeid] = text

    return compare


@pytest.fixture(scope="session", autouse=True)
def no_tiny_numbers():
    """Random weights have gradients so small that each takes a CPU a hundred times as long."""
    import torch

    torch.set_flush_denormal(True)


@pytest.fixture(scope="session", autouse=True)
def seeds_without_stacks():
    """For each kind of device that is not used yet, torch.manual_seed formats the stack: of pytest
    it has 60 frames, and that takes as long as a step of a small model.
    """
    import torch

    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name, None)  # older releases have fewer of them
        if device is not None and not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def imports_are_frozen():
    """Each release of memory calls gc.collect(), which would look through all that was imported."""
    if len(sys.modules) > 1.02 * _frozen[-1]:
        gc.collect()
        gc.freeze()
        gc.enable()
        _frozen.append(len(sys.modules))


@pytest.fixture(scope="session")
def coins(tmp_path_factory):
    """Folder of the Coins dataset, registered as coins_train and coins_val."""
    from make_dataset import make_dataset
    from resumed import register_coins

    folder = tmp_path_factory.mktemp("coins")
    make_dataset(folder)
    register_coins(folder)
    return folder


@pytest.fixture
def catalogs(monkeypatch):
    """What a test registers in Detectron2's catalogs is gone after it."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    for catalog in (DatasetCatalog, MetadataCatalog):
        monkeypatch.setattr(catalog, "data", dict(catalog.data))


def ranks(number):
    from ranks import Ranks

    ranks = Ranks(number)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks():
    yield from ranks(2)


@pytest.fixture(scope="session")
def three_ranks():
    yield from ranks(3)


@pytest.fixture(autouse=True)
def options_of_the_environment(monkeypatch):
    """What one test's job asks of PyTorch's allocator and of oneDNN is not there for the next."""
    for name in (
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "LRU_CACHE_CAPACITY",
    ):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def records_of_runs(monkeypatch, tmp_path_factory):
    """What one test has asked is not known to the next test."""
    folder = tmp_path_factory.getbasetemp() / "records" / str(next(_numbers))
    monkeypatch.setenv("D2_MEMFIT_CACHE", str(folder))
    return folder


@pytest.fixture
def alarm():
    """Ends what waits for ever, as for a pipe."""

    def fail(*_):
        pytest.fail("it waited for a minute")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def log(caplog, monkeypatch):
    """caplog for our loggers, which Detectron2's setup_logger keeps from the root logger."""
    logger = logging.getLogger("d2_memfit")
    monkeypatch.setattr(logger, "propagate", False)  # or else each line is there twice
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "d2_memfit")
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def computing(monkeypatch):
    """Makes a job compute all that it does not, without changing what is counted."""
    from d2_memfit.memory import TensorMeter
    from d2_memfit.planner import steps
    from d2_memfit.planner.dry_run import DryRun

    def compute():
        monkeypatch.setattr(steps, "WithoutValues", nullcontext)
        monkeypatch.setattr(DryRun, "_call", TensorMeter._call)

    return compute
