# Copyright (c) the d2_memfit developers.
"""What is said about a release in more than one place is the same in each."""

import re

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
    assert versions[:1] == [d2_memfit.__version__]
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


def test_continuous_integration_has_the_oldest_and_the_newest_of_all():
    suite = WORKFLOW["jobs"]["suite"]["strategy"]["matrix"]["include"]
    expected = {(f"3.{m}", d) for m in (SUPPORTED[0], SUPPORTED[-1]) for d in ("v0.6", "main")}
    assert {(job["python"], job["detectron2"]) for job in suite} >= expected
    oldest = re.search(r"PyTorch (2\.\d+) and later", read("README.md"))[1]
    newest = re.search(r"^torch==([\d.]+)", read("requirements/dev.txt"), re.MULTILINE)[1]
    torches = {job["torch"] for job in suite}
    assert {newest, f"{oldest}.0"} <= torches
    assert f"({', '.join(oldest.split('.'))})" in read("d2_memfit/common/startup.py")
