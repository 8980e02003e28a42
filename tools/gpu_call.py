#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure a card that is there for ten minutes, with PyTorch but without Detectron2 or a network.

    .venv/bin/python tools/gpu_call.py prepare --detectron2 MIRROR    # a git folder; on any machine
    OUT=results python3 tools/gpu_call.py run                         # on the machine with the card

``prepare`` makes two folders, which git ignores. Copy them with the checkout: ``.site`` has the
packages that the machine lacks, ``.gpu`` has photographs to train on. ``run`` leaves log.txt,
tests.xml and measured.jsonl in the folder OUT. If the card does not answer, it ends with status 3.
To go on later, put measured.jsonl into ``.gpu``: its items are not measured again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import make_venv

ROOT = make_venv.ROOT
SITE, FOLDER = ROOT / ".site", ROOT / ".gpu"
WHEELS = ("bitsandbytes", "hydra-core", "iopath", "omegaconf", "pycocotools", "termcolor", "yacs")
SOURCES = ("antlr4-python3-runtime", "fvcore")  # pure Python, without wheels
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
COINS = FOLDER / "coins"
TRAIN = (
    *("-m", "d2_memfit", "train", "--fit", "--card", "6GB"),
    *("--config-file", "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"),
    *("--coco", "coins", COINS / "train.json", COINS / "train"),
    *("OUTPUT_DIR", FOLDER / "train", "SOLVER.MAX_ITER", "20", "MODEL.WEIGHTS", ""),
)
REHEARSAL = """
from made_up_card import made_up_card
card = made_up_card()
card.__enter__()
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=("prepare", "run"))
    parser.add_argument("--detectron2", metavar="MIRROR", help="git folder of Detectron2")
    parser.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    parser.add_argument("--cuda", default="130", help="version there (default: 130)")
    parser.add_argument("--seconds", type=float, default=570, help="of a run (default: 570)")
    parser.add_argument("--rehearse", action="store_true", help="a little, on a made-up card")
    args = parser.parse_args()
    if args.step == "prepare":
        prepare(args.detectron2, args.python, args.cuda)
    else:
        sys.exit(run(Path(os.environ["OUT"]).resolve(), args.seconds, args.rehearse))


def prepare(mirror: str, python: str, cuda: str) -> None:
    for folder in (SITE, FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    lines = make_venv.REQUIREMENTS.read_text().splitlines()
    pins = {line.partition("==")[0]: line.partition(";")[0].split("#")[0].strip() for line in lines}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    there = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for platform in PLATFORMS:
        there += ["--platform", f"{platform}_x86_64"]
    with tempfile.TemporaryDirectory() as temporary:
        wheels = [pins[name] for name in WHEELS]
        make_venv.run(*pip, "download", "--no-deps", *there, "-d", temporary, *wheels)
        sources = [pins[name] for name in SOURCES]
        make_venv.run(*pip, "wheel", "--no-deps", "-w", temporary, *sources)
        for wheel in Path(temporary).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(SITE)
        archive = Path(temporary, "detectron2.tar")
        make_venv.run("git", f"--git-dir={mirror}", "archive", "HEAD", "--output", archive)
        shutil.unpack_archive(archive, archive.with_suffix(""))
        make_venv.copy_detectron2(archive.with_suffix(""), SITE)
    for library in SITE.glob("bitsandbytes/libbitsandbytes_*"):
        if not library.stem.endswith((f"_cuda{cuda}", "_cpu")):
            library.unlink()
    shutil.copy(make_venv.DETECTRON2_ALIASES, SITE)
    first = SITE / "detectron2" / "__init__.py"
    first.write_text(f"import detectron2_aliases\n{first.read_text()}")
    make_venv.run(sys.executable, ROOT / "projects" / "Coins" / "make_dataset.py", COINS)


def run(out: Path, seconds: float, rehearse: bool = False) -> int:
    """Run all steps, and return the status: 3 if the card does not answer."""
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    paths = [SITE, ROOT]
    if rehearse:
        paths = [ROOT, ROOT / "tests", out]
        (out / "sitecustomize.py").write_text(REHEARSAL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}

    def step(most: float, *command: object) -> int:
        most = min(most, end - time.monotonic() - 10)  # 8 s after an interrupt it is killed
        if most < 1:
            return 0
        timed = ["timeout", "-s", "INT", "-k", "8", f"{most:.0f}", sys.executable]
        timed += map(str, command)
        with (out / "log.txt").open("a") as log:
            log.write(f"{' '.join(timed)}\n")
            process = subprocess.Popen(
                timed, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert process.stdout is not None
            for line in process.stdout:
                print(line.decode(), end="", flush=True)
                log.write(line.decode())
        return process.wait()

    def measure(most: float, *options: str) -> int:
        most = min(most, end - time.monotonic() - 20)
        command = ("-m", "d2_memfit", "measure-gpu", "--seconds", most, "--output", records)
        return step(most + 10, *command, *options)

    records = out / "measured.jsonl"
    if (FOLDER / records.name).exists():
        shutil.copy(FOLDER / records.name, records)
    small = ["--small"] if rehearse else []
    if measure(100, "--items", "device", *small):
        return 3
    some = ["-k", "allocations_above"] if rehearse else []
    tests = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", "--durations=8")
    step(120, *tests, "--junitxml", out / "tests.xml", "-m", "gpu", *some, "tests/gpu")
    if rehearse:
        measure(seconds, "--items", "2 images", *small)
    else:
        measure(250)
        step(80, *TRAIN)
        measure(seconds)
    return 0


if __name__ == "__main__":
    main()
