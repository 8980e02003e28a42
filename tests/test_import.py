"""The package without Detectron2, and as pip installs it."""

import os
import shutil
import sys
import venv
from pathlib import Path

from tiny import ROOT, run_process


def test_without_detectron2_one_clear_error_names_the_ways_to_get_it(tmp_path):
    venv.create(tmp_path / "empty")
    command = [tmp_path / "empty" / "bin" / "python", "-c", "import d2_memfit"]
    result = run_process(command, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
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
    installed = run_process([*pip, "--target", target, source], cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    script = (
        "import d2_memfit; from d2_memfit import model_zoo;"
        "names = model_zoo.list_configs();"
        "print(d2_memfit.__file__); print(model_zoo.get_config_file(names[0]));"
        "from d2_memfit.planner.device_model import device_names; print(*device_names());"
        "print(len(names), model_zoo.get_config(names[0]).SOLVER.IMS_PER_BATCH)"
    )
    elsewhere = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
    result = run_process(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PYTHONPATH": os.pathsep.join([str(target), *elsewhere])},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    package, config, devices, rest = result.stdout.splitlines()
    assert package.startswith(str(target))
    assert config.startswith(str(target))
    assert devices == "cpu cuda v100"
    assert (target / "bin" / "d2-memfit").exists()
    assert (target / "d2_memfit" / "py.typed").exists()
    assert rest.endswith(" 16")
