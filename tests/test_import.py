# Copyright (c) the d2_memfit developers.
"""The package without Detectron2, and as pip installs it."""

import importlib.util
import os
import re
import shutil
import sys
import venv
from pathlib import Path

import pytest
from tiny import ROOT, run_process

import d2_memfit
from d2_memfit.cli.command_line import COMMANDS

EXTRAS = {  # with a module of each
    "8bit": "bitsandbytes",
    "lora": "peft",
    "smaller": "torch_pruning",
    "tiles": "rasterio",
    "transformers": "transformers",
}


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["-c", "import d2_memfit; d2_memfit.MemfitTrainer"], 1),
        (["-m", "d2_memfit", "--help"], 0),
        (["-m", "d2_memfit", "train", "--help"], 0),
        (["-m", "d2_memfit", "train", "--fit", "--config-file", "mine.yaml"], 2),
    ],
)
def test_without_detectron2_the_ways_to_get_it_are_named_and_help_is_shown(
    tmp_path, arguments, status
):
    venv.create(tmp_path / "empty")
    command = [tmp_path / "empty" / "bin" / "python", *arguments]
    result = run_process(command, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert result.returncode == status
    assert ("usage: d2-memfit" in result.stdout) == (status == 0)
    assert "Traceback" not in result.stderr or status == 1
    for text in ("no PyTorch", "\n  make venv\n", "docs/INSTALL.md"):
        assert text in result.stderr


def test_pytorch_that_is_too_old_is_one_clear_error(tmp_path):
    folder = tmp_path / "torch-2.5.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code = "import d2_memfit; d2_memfit.get_cfg"
    result = run_process([sys.executable, "-c", code], env={"PYTHONPATH": path})
    assert result.returncode == 1
    assert "ImportError: d2_memfit needs PyTorch 2.6 or later" in result.stderr
    assert "has 2.5.1" in result.stderr


def test_setuptools_can_be_imported_after_all_that_the_package_looks_for():
    """Detectron2 does, by PyTorch's cpp_extension."""
    code = "import d2_memfit.common.startup as e; e.missing(); import setuptools"
    run = run_process([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT)
    assert run.returncode == 0, run.stderr


STATE = """
import gc, importlib, logging, os, signal, sys, threading
import detectron2.engine
from PIL import Image
from torch.utils.data import DataLoader, Dataset

def state():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    mask, threads = signal.pthread_sigmask(signal.SIG_BLOCK, ()), threading.enumerate()
    others = gc.isenabled(), gc.get_freeze_count(), logging.raiseExceptions, Image.MAX_IMAGE_PIXELS
    hooks = sys.excepthook, threading.excepthook
    return handlers, mask, threads, hooks, others, list(sys.path), dict(os.environ)

class States(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return len(mask), sys.excepthook is sys.__excepthook__, threading.active_count()

before = state()
sys.modules["pkg_resources"] = None  # setuptools 82 no longer has it
for name in {names}:
    importlib.import_module(name)
assert state() == before, (before, state())
((found,),) = DataLoader(States(), num_workers=1, collate_fn=list)
assert found == (0, True, 1), found
"""


@pytest.mark.slow
def test_an_import_changes_no_signal_thread_hook_or_variable_nor_those_of_workers(tmp_path):
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "d2_memfit").rglob("*.py")
        if path.stem not in ("__init__", "__main__")
    ]
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    code = STATE.replace("{names}", repr(names))
    run = run_process([sys.executable, "-W", "ignore", "-c", code], env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an environment that has this one's packages beneath its own, where pip has
    installed d2_memfit's wheel, and the packages of both before that.
    """
    folder = tmp_path_factory.mktemp("installed")
    source, environment = folder / "source", folder / "environment"
    for name in ("d2_memfit", "configs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    made = run_process([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source])
    assert made.returncode == 0, made.stderr
    venv.create(environment)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    elsewhere = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
    beneath = "".join(f"import site; site.addsitedir({p!r})\n" for p in elsewhere)
    (packages / "beneath.pth").write_text(beneath)
    before = packages_of(python)
    there = [extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module)]
    wheels = [f"{path}[{','.join(there)}]" for path in folder.glob("*.whl")]
    # Without an index: a requirement that is not there already would end it.
    done = run_process([*pip, "--python", python, "install", "--no-index", *wheels], env={})
    assert done.returncode == 0, done.stderr
    return python, before


def packages_of(python):
    """Folders of the packages' metadata, which have name and version."""
    code = (
        "from importlib.metadata import distributions;"
        "print('\\n'.join(sorted({str(d._path) for d in distributions()})))"
    )
    return run_process([python, "-c", code], env={}).stdout.splitlines()


@pytest.mark.slow
def test_pip_installs_d2_memfit_with_its_data_and_changes_nothing_else(installed, tmp_path):
    """With all extras whose packages are there."""
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert set(re.findall(r"^(\w+) = \[", extras.partition("\n\n")[0], re.MULTILINE)) == {*EXTRAS}
    python, before = installed
    after = packages_of(python)
    assert set(before) <= set(after)
    (new,) = set(after) - set(before)
    assert Path(new).name == f"d2_memfit-{d2_memfit.__version__}.dist-info"
    assert Path(new).is_relative_to(python.parents[1])
    code = (
        "import importlib.resources as r; from d2_memfit import model_zoo;"
        "from d2_memfit.planner.device import device_names;"
        "from importlib.metadata import metadata;"
        "print(*device_names()); print(len(model_zoo.list_configs()));"
        "print(r.files('d2_memfit').joinpath('py.typed').is_file());"
        "print(*metadata('d2_memfit').get_all('License-File'))"
    )
    run = run_process([python, "-W", "ignore", "-c", code], env={}, cwd=tmp_path)
    devices, configs, is_typed, license_file = run.stdout.splitlines()
    assert {"cpu", "cuda", "rtx_3060", "v100"} <= set(devices.split())
    assert int(configs) > 80
    assert (is_typed, license_file) == ("True", "LICENSE")
    command = python.parent / "d2-memfit"
    version = run_process([command, "--version"], env={}, cwd=tmp_path)
    assert version.stdout.strip() == f"d2_memfit {d2_memfit.__version__}"
    text = run_process([command, "--help"], env={}, cwd=tmp_path).stdout
    assert all(f"\n    {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["plan", "--no-such-option"]]
)
def test_help_and_errors_of_the_command_line_do_not_import_pytorch(arguments):
    code = (
        "import sys; from d2_memfit.__main__ import main\n"
        f"sys.argv[1:] = {arguments}\n"
        "try: main()\n"
        "except SystemExit: print('imported:', 'torch' in sys.modules)"
    )
    assert "imported: False" in run_process([sys.executable, "-c", code]).stdout


@pytest.mark.slow
def test_the_installed_command_plans_and_trains(installed, coins, tmp_path):
    python, _ = installed
    command = [python.parent / "d2-memfit"]
    job = [
        *("--config-file", "COCO-Detection/faster_rcnn_R_50_FPN_3x"),
        *("--coco", "coins_wheel", coins / "train.json", coins / "train"),
    ]
    opts = ["MODEL.WEIGHTS", "", "MODEL.ROI_BOX_HEAD.FC_DIM", 64, "DATALOADER.NUM_WORKERS", 0]
    opts += ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64]
    opts += ["INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MAX_SIZE_TRAIN", 96, "SOLVER.MAX_ITER", 1]
    opts += ["SOLVER.IMS_PER_BATCH", 2, "OUTPUT_DIR", tmp_path / "output"]
    run = run_process([*command, "train", "--fit", *job, *opts], env={}, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "MODEL.ROI_HEADS.NUM_CLASSES" in run.stdout
    assert (tmp_path / "output" / "model_final.pth").exists()
