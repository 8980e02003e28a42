# Copyright (c) the d2_memfit developers.
"""What an environment lacks for d2_memfit, and the line to type. Standard library only."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

__all__ = ["Environment", "missing"]

_MAIN = "'git+https://github.com/facebookresearch/detectron2.git'"
_WHEELS = "https://miropsota.github.io/torch_packages_builder"
_WHEELS_FOR = ((2, 3), (2, 13))  # the first and the last PyTorch
_OLDEST_PYTORCH = (2, 6)


def missing() -> Optional[str]:
    """What this environment lacks for d2_memfit, and how to get it; None if nothing.

    No requirement of the package says so: pip would replace the PyTorch that this Detectron2 is
    made for.
    """
    # A folder of this name, such as that of a clone, would be found too, but has no origin.
    origin = getattr(importlib.util.find_spec("detectron2"), "origin", None)
    if origin is None:
        here = Environment.here()
        return (
            f"d2_memfit extends Detectron2, and this environment has none: {here}.\n"
            f"Here, type:\n  {here.line_to_type()}\n"
            "All ways: docs/INSTALL.md"
        )
    hooks = Path(origin).with_name("engine") / "hooks.py"
    if hooks.is_file() and "class BestCheckpointer" not in hooks.read_text("utf-8"):
        return (
            f"d2_memfit needs Detectron2 v0.6 or main, and {Path(origin).parent} is older. Install "
            "a newer one. If it is a project's own copy, add the project's files to v0.6"
        )
    if importlib.util.find_spec("torch") is None:
        return "Detectron2 needs PyTorch, and this environment has none: see https://pytorch.org"
    torch = importlib.metadata.version("torch")
    if _release(torch) < _OLDEST_PYTORCH:
        return f"d2_memfit needs PyTorch 2.6 or later, and this environment has {torch}"
    return None


@dataclass(frozen=True)
class Environment:
    """What decides how Detectron2 can be installed.

    Attributes:
        python: major and minor version.
        torch: version of PyTorch; None without it.
        cuda: version of CUDA that PyTorch is made for, such as "12.6"; None for a CPU.
        compiles: whether there are compilers: for C++, and for CUDA if PyTorch is made for it.
        is_conda: whether conda has made it.
        pip: the command that installs: an environment made by uv has no pip.
        has_wheels: whether the machine is one that ready-built wheels are for.
    """

    python: tuple[int, int] = (3, 12)
    torch: Optional[str] = None
    cuda: Optional[str] = None
    compiles: bool = False
    is_conda: bool = False
    pip: str = "pip install"
    has_wheels: bool = True

    @classmethod
    def here(cls) -> "Environment":
        """The environment of this process."""
        torch = cuda = None
        spec = importlib.util.find_spec("torch")
        if spec is not None:
            torch = importlib.metadata.version("torch")
            cuda = _cuda_of(spec.origin)
        has_nvcc = shutil.which("nvcc") or os.environ.get("CUDA_HOME")
        machine = platform.machine().lower() in ("x86_64", "amd64")
        return cls(
            sys.version_info[:2],
            torch,
            cuda,
            bool(shutil.which(os.environ.get("CXX", "g++")) and (cuda is None or has_nvcc)),
            (Path(sys.prefix) / "conda-meta").is_dir(),
            "pip install" if _has_pip() else "uv pip install",
            machine and sys.platform in ("linux", "win32"),
        )

    def __str__(self) -> str:
        python = "Python {}.{}".format(*self.python)
        if self.torch is None:
            return f"{python}, no PyTorch"
        return f"{python}, PyTorch {self.torch} for {f'CUDA {self.cuda}' if self.cuda else 'CPUs'}"

    def line_to_type(self) -> str:
        """The line that installs a Detectron2 here; docs/INSTALL.md has the others."""
        if self.is_conda and self.python >= (3, 10):
            return "conda install -c conda-forge detectron2"
        if self.torch is not None and self.compiles:
            return (
                f"{self.pip} 'setuptools<82' wheel ninja && {self.pip} --no-build-isolation {_MAIN}"
            )
        first, last = _WHEELS_FOR
        if self.torch is not None and self.has_wheels and first <= _release(self.torch) <= last:
            plain = self.torch.partition("+")[0]
            made_for = f"pt{plain}{'cu' + self.cuda.replace('.', '') if self.cuda else 'cpu'}"
            return (
                f"{self.pip} --extra-index-url {_WHEELS} 'detectron2==0.6+VERSION{made_for}', with "
                f"the VERSION before {made_for} in the list {_WHEELS}/detectron2"
            )
        return "make venv, in a checkout of d2_memfit: Detectron2 v0.6 without compiled operators"


def _release(torch: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, torch.split(".")[:2]))


def _has_pip() -> bool:
    # find_spec("pip") would make a later import of setuptools fail: its hook takes it for a run of
    # pip (_distutils_hack, spec_for_pip).
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cuda_of(origin: Optional[str]) -> Optional[str]:
    """The CUDA of PyTorch's version.py, which is not imported."""
    file = Path(origin or "").with_name("version.py")
    if file.is_file():
        for line in file.read_text().splitlines():
            if line.startswith("cuda"):
                return line.partition("=")[2].strip().strip("'\"").replace("None", "") or None
    return None
