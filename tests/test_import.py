"""The package without Detectron2, and as pip installs it."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tiny import ROOT


def test_without_detectron2_one_clear_error_names_the_ways_to_get_it(tmp_path):
    venv.create(tmp_path / "empty")
    command = [tmp_path / "empty" / "bin" / "python", "-c", "import d2_memfit"]
    result = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path
    )
    assert result.returncode == 1
    message = result.stderr[result.stderr.index("ImportError") :]
    assert "this environment has none" in message
    assert "pip install" in message
    assert "make venv" in message


def test_pip_installs_the_package_with_its_configs(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    for name in ("d2_memfit", "configs"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True, cwd=tmp_path)
    script = (
        "import d2_memfit; from d2_memfit import model_zoo;"
        "names = model_zoo.list_configs();"
        "print(d2_memfit.__file__); print(model_zoo.get_config_file(names[0]));"
        "print(len(names), model_zoo.get_config(names[0]).SOLVER.ACCUMULATION_STEPS)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join([str(target), *_without_checkout(sys.path)])},
        cwd=tmp_path,
    )
    package, config, rest = result.stdout.splitlines()
    assert package.startswith(str(target))
    assert config.startswith(str(target))
    assert rest.endswith(" 8")


def _without_checkout(paths):
    return [p for p in paths if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
