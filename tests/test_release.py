# Copyright (c) the d2_memfit developers.
"""What is said about a release in more than one place is the same in each."""

import os
import re
import subprocess

import make_venv
import yaml
from tiny import ROOT

import d2_memfit


def read(name):
    return (ROOT / name).read_text()


def python_versions(text):
    """Minor versions of Python 3 that a text names: [9, 11] of "3.9 and 3.11"."""
    return [int(minor) for minor in re.findall(r"\b3\.(\d+)", text)]


SUPPORTED = python_versions("\n".join(re.findall(r"Python :: (3\.\d+)", read("pyproject.toml"))))
WORKFLOW = yaml.safe_load(read(".github/workflows/ci.yml"))


def test_the_newest_release_notes_are_of_this_version():
    versions = re.findall(r"^## (\S+)(?: - \d{4}-\d\d-\d\d)?$", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[:2] == [d2_memfit.__version__, "0.2.0"]
    supported = d2_memfit.__version__.rpartition(".")[0]
    assert f"| {supported} | yes |" in read("SECURITY.md")


def test_pythons_are_those_of_the_classifiers():
    oldest, newest = SUPPORTED[0], SUPPORTED[-1]
    assert list(range(oldest, newest + 1)) == SUPPORTED
    assert f'requires-python = ">=3.{oldest}"' in read("pyproject.toml")
    assert f"Python 3.{oldest} to 3.{newest}" in read("README.md")
    for minor in (oldest - 1, newest + 1):
        assert make_venv.complaint_about((3, minor))
    assert not any(make_venv.complaint_about((3, minor)) for minor in SUPPORTED)


def jobs_of(name):
    """The combinations of a job's matrix."""
    matrix = dict(WORKFLOW["jobs"][name]["strategy"]["matrix"])
    return matrix.pop("include")


def test_continuous_integration_has_the_oldest_and_the_newest_of_all():
    suite = [job for job in jobs_of("suite") if not job.get("experimental")]
    pythons = sorted({minor for job in suite for minor in python_versions(job["python"])})
    with_both = [SUPPORTED[0], 11, SUPPORTED[-1]]
    assert pythons == sorted([*with_both, 12])  # from which on failed attempts are in cycles
    assert {(job["python"], job["detectron2"]) for job in suite} >= {
        ("3.12", "main"),
        *((f"3.{minor}", release) for minor in with_both for release in ("v0.6", "main")),
    }
    oldest = re.search(r"PyTorch (2\.\d+) and later", read("README.md"))[1]
    newest = re.search(r"^torch==([\d.]+)", read("requirements/dev.txt"), re.MULTILINE)[1]
    torches = {job["torch"] for job in suite}
    assert {newest, f"{oldest}.0"} <= torches
    assert f"({', '.join(oldest.split('.'))})" in read("d2_memfit/common/startup.py")


def workflow(name):
    return yaml.safe_load(read(f".github/workflows/{name}.yml"))


def test_the_tag_of_a_release_names_the_version():
    """The line of the workflow, run with the right and with another tag."""
    steps = workflow("release")["jobs"]["build"]["steps"]
    (line,) = [step["run"] for step in steps if "GITHUB_REF_NAME" in step.get("run", "")]
    for tag, status in ((f"v{d2_memfit.__version__}", 0), ("v9.9.9", 1), ("v0", 1)):
        env = {**os.environ, "GITHUB_REF_NAME": tag}
        run = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, check=False)
        assert run.returncode == status
