#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Make a virtual environment with PyTorch, Detectron2 v0.6 and what the demo and the tests need.

    python3 tools/make_venv.py .venv

For machines that have no Detectron2. An environment that this script did not make is left as it
is, so that `make VENV=/path/to/yours test` runs in yours. Needs Python 3.9 to 3.13, about 6 GB of
disk and two minutes. From 3.12 on, NumPy and Pillow are current ones, and Detectron2 gets the names
that it misses there from requirements/detectron2_aliases.py.

Other releases, as continuous integration has them, are built with their operators, which takes a
compiler and some minutes. `make` then leaves the environment as it is:

    python3 tools/make_venv.py .venv-main \
        --detectron2 git+https://github.com/facebookresearch/detectron2@main --torch 2.6.0
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "dev.txt"
DOCS = ROOT / "requirements" / "docs.txt"
DETECTRON2 = ROOT / "requirements" / "detectron2.txt"
DETECTRON2_OPS = ROOT / "requirements" / "detectron2_ops.py"
DETECTRON2_ALIASES = ROOT / "requirements" / "detectron2_aliases.py"

# Python from which on there is no NumPy as old as Detectron2 v0.6.
CURRENT_NUMPY = (3, 12)

# Folders of Detectron2's archive, and where its own setup.py would install them.
PACKAGES = {
    "detectron2": "detectron2",
    "projects/PointRend/point_rend": "detectron2/projects/point_rend",
    "projects/DeepLab/deeplab": "detectron2/projects/deeplab",
    "projects/Panoptic-DeepLab/panoptic_deeplab": "detectron2/projects/panoptic_deeplab",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument(
        "--detectron2", help="what pip builds Detectron2 from, such as git+https://"
    )
    parser.add_argument(
        "--torch", help="version of PyTorch, other than that of requirements/dev.txt"
    )
    args = parser.parse_args()
    venv = args.venv.absolute()

    metadata, _, _ = (ROOT / "pyproject.toml").read_text().partition("[tool.")  # and the command
    files = (Path(__file__), REQUIREMENTS, DOCS, DETECTRON2, DETECTRON2_OPS, DETECTRON2_ALIASES)
    inputs = [metadata.encode(), *(file.read_bytes() for file in files)]
    wanted = " ".join(hashlib.sha256(content).hexdigest() for content in inputs)
    marker = venv / "made-by-d2_memfit"
    if venv.exists() and not marker.exists() and not (venv / "bin" / "python").exists():
        sys.exit(f"error: {venv} is no environment: it has no bin/python. Name another one")
    if venv.exists() and (not marker.exists() or marker.read_text() == wanted):
        return
    complaint = complaint_about(sys.version_info[:2])
    if complaint and not args.detectron2:  # continuous integration tries the next Python
        sys.exit(complaint)

    print(f"Setting up {venv} (once, about two minutes) ...", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    marker.write_text("incomplete")  # so that a set-up that was interrupted is made again
    try:
        run(sys.executable, "-m", "venv", venv)
        install(venv / "bin" / "python", args.detectron2, args.torch)
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: the set-up of {venv} failed in: {' '.join(e.cmd)}")
    if args.detectron2 or args.torch:
        marker.unlink()  # it is as it was asked for, and not what `make` would make
    else:
        marker.write_text(wanted)


def complaint_about(version: "tuple[int, int]") -> Optional[str]:  # not before Python 3.9
    """Why this version of Python cannot be used and what to do; None if it can."""
    if (3, 9) <= version <= (3, 13):
        return None
    return f"""\
error: the packages of requirements/dev.txt are for Python 3.9 to 3.13; this is Python \
{".".join(map(str, version))}.
Either name another Python:                      make PYTHON=python3.12 test
or your own environment, with Detectron2:        make VENV=/path/to/environment test"""


def install(python: Path, detectron2: Optional[str], torch: Optional[str]) -> None:
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / REQUIREMENTS.name
        requirements.write_text(requirements_for(torch))
        run(*pip, "install", "-r", requirements, "-r", DOCS)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(subprocess.check_output([python, "-c", purelib], text=True).strip())
    if detectron2:  # its setup.py imports PyTorch
        run(*pip, "install", "--no-deps", "--no-build-isolation", detectron2)
    else:
        with tempfile.TemporaryDirectory() as folder:
            copy_detectron2(archive_of_v06(pip, folder), site_packages)
    if sys.version_info >= CURRENT_NUMPY:
        shutil.copy(DETECTRON2_ALIASES, site_packages)
        (site_packages / "detectron2_aliases.pth").write_text("import detectron2_aliases\n")
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--editable", ROOT)


def requirements_for(torch: Optional[str]) -> str:
    """The pinned packages, with another PyTorch if one is asked for, and what goes with it."""
    lines = REQUIREMENTS.read_text().splitlines()
    if torch:
        of_torch = ("torch==", "torchvision==", "nvidia-", "cuda-", "triton==")
        lines = [line for line in lines if not line.startswith(of_torch)]
        lines += [f"torch=={torch}", "torchvision"]
    return "\n".join(lines)


def archive_of_v06(pip: "tuple[object, ...]", folder: str) -> Path:
    """Download v0.6, and unpack it into the folder."""
    # pip checks the archive's hash first. To read its metadata it runs setup.py, which imports
    # PyTorch: hence no build isolation.
    flags = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes")
    run(*pip, "download", *flags, "-r", DETECTRON2, "-d", folder)
    (archive,) = Path(folder).glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    (source,) = (p for p in Path(folder).iterdir() if p.is_dir())
    return source


def copy_detectron2(source: Path, site_packages: Path) -> None:
    """Install the Python files of a Detectron2, without its compiled operators."""
    for origin, target in PACKAGES.items():
        shutil.copytree(source / origin, site_packages / target)
    configs = site_packages / "detectron2" / "model_zoo" / "configs"
    if not configs.exists():  # in a checkout, its setup.py would make a link
        shutil.copytree(source / "configs", configs)
    shutil.copy(DETECTRON2_OPS, site_packages / "detectron2" / "_C.py")


def run(*command: object) -> None:
    subprocess.run([str(c) for c in command], check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
