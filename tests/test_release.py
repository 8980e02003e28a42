# Copyright (c) the d2_memfit developers.
"""What is said about a release in more than one place is the same in each."""

import json
import os
import re
import subprocess

import make_venv
import pytest
import set_address
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
    assert f"({', '.join(oldest.split('.'))})" in read("d2_memfit/environment.py")


def test_continuous_integration_runs_targets_of_the_makefile():
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    commands = [step.get("run", "") for step in steps]
    targets = {
        target
        for command in commands
        for line in re.findall(r"^make (.*)", command, re.MULTILINE)
        for target in line.split()
        if "=" not in target and not target.startswith('"')
    }
    assert {"types", "test", "docs"} <= targets
    assert all(f"\n{target}:" in read("Makefile") for target in targets)


def workflow(name):
    return yaml.safe_load(read(f".github/workflows/{name}.yml"))


def test_a_release_is_built_tried_and_published_without_a_password():
    jobs = workflow("release")["jobs"]
    assert [job.get("needs") for job in jobs.values()] == [None, "build", "try"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("password" in step.get("with", {}) for step in publish["steps"])
    assert jobs["try"]["strategy"]["matrix"]["file"] == ["*.whl", "*.tar.gz"]
    assert not any("checkout" in step.get("uses", "") for step in jobs["try"]["steps"])


def test_the_tag_of_a_release_names_the_version():
    """The line of the workflow, run with the right and with another tag."""
    steps = workflow("release")["jobs"]["build"]["steps"]
    (line,) = [step["run"] for step in steps if "GITHUB_REF_NAME" in step.get("run", "")]
    for tag, status in ((f"v{d2_memfit.__version__}", 0), ("v9.9.9", 1), ("v0", 1)):
        env = {**os.environ, "GITHUB_REF_NAME": tag}
        run = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, check=False)
        assert run.returncode == status


def test_all_workflows_use_the_same_releases_of_actions():
    used = {}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action, release in re.findall(r"uses: (actions/\S+)@(\S+)", file.read_text()):
            used.setdefault(action, set()).add(release)
    assert "actions/checkout" in used
    assert {action: releases for action, releases in used.items() if len(releases) > 1} == {}


def test_the_citation_can_be_read():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["license"] == "Apache-2.0"


def test_one_address_is_written_into_all_that_needs_it(tmp_path):
    files = {file for file, *_ in set_address.PLACES}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(read(file))
    before = {file: read(file) for file in files}
    for address in ("https://github.com/Other/other", "https://github.com/Some-One/memfit.git"):
        set_address.set_address(tmp_path, address)
    after = {file: (tmp_path / file).read_text() for file in files}
    assert all("github.com/Some-One/memfit" in text for text in after.values())
    assert "ther/other" not in "".join(after.values())
    assert "memfit.git" not in "".join(after.values())
    assert {f: len(after[f].splitlines()) - len(before[f].splitlines()) for f in files} == {
        "CITATION.cff": 1,
        "README.md": 5,
        "docs/INSTALL.md": 0,
        "docs/notebooks/first_steps.ipynb": 2,
        "mkdocs.yml": 2,
        "pyproject.toml": 6,
    }
    cells = json.loads(after["docs/notebooks/first_steps.ipynb"])["cells"]
    assert "/colab.research.google.com/github/Some-One/memfit/blob/main/docs/" in str(cells[0])
    code = "".join(cells[1]["source"])
    assert '\nREPOSITORY = "https://github.com/Some-One/memfit"  #' in code
    citation = yaml.safe_load(after["CITATION.cff"])
    assert citation["repository-code"] == "https://github.com/Some-One/memfit"


@pytest.mark.parametrize(
    "address", ["", "github.com/a/b", "https://github.com/a", "https://x.y/a/b"]
)
def test_what_is_no_address_is_refused(tmp_path, address):
    with pytest.raises(ValueError, match="must be https://github"):
        set_address.set_address(tmp_path, address)


def test_the_recipe_of_conda_has_the_requirements_of_the_package():
    recipe = yaml.safe_load(read("tools/conda/recipe.yaml"))
    assert recipe["context"]["version"] == d2_memfit.__version__
    table = re.search(
        r"^dependencies = \[\n(.*?)^\]", read("pyproject.toml"), re.DOTALL | re.MULTILINE
    )
    asked = set(re.findall(r'^    "(\S+)"', table[1].lower(), re.MULTILINE))
    names = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
    run = {line.split()[0] for line in recipe["requirements"]["run"]}
    assert {names.get(name, name) for name in run} == {*asked, "python", "detectron2"}
    (script,) = re.findall(r'^d2-memfit = "(.*)"', read("pyproject.toml"), re.MULTILINE)
    assert recipe["build"]["python"]["entry_points"] == [f"d2-memfit = {script}"]


def test_the_container_is_made_by_a_target_of_the_makefile():
    lines = read("Dockerfile")
    (target,) = re.findall(
        r"^RUN make -C /opt/d2_memfit (\w+) VENV=/opt/venv$", lines, re.MULTILINE
    )
    assert f"\n{target}:" in read("Makefile")
    (python,) = python_versions(re.search(r"^FROM (.*)", lines, re.MULTILINE)[1])
    assert python in SUPPORTED
    container = json.loads(read(".devcontainer/devcontainer.json"))
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).is_file()


def test_the_license_has_an_owner():
    assert "\nCopyright 2026 the d2_memfit developers\n" in read("LICENSE")
    assert "[yyyy]" not in read("LICENSE")
