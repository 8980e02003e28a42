# Copyright (c) the d2_memfit developers.
"""The notebook of docs/notebooks does what it says."""

import importlib.util
import json
import os
import sys

import pytest
from tiny import ROOT

FILE = ROOT / "docs" / "notebooks" / "first_steps.ipynb"


def test_it_is_committed_as_it_ran_from_top_to_bottom():
    assert FILE.stat().st_size < 150_000
    cells = [c for c in json.loads(FILE.read_text())["cells"] if c["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]


@pytest.mark.sweep
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="nbclient or ipykernel is not there: requirements/docs.txt",
)
def test_it_runs(monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    notebook = nbformat.read(FILE, 4)
    folder = {"metadata": {"path": str(FILE.parent)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=folder).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert len(printed) == 10
    assert "It ended with status 1." in printed[4]
    assert "32 images: the micro-batch is halved to 16" in printed[6]
    assert "image/png" in notebook.cells[-2].outputs[0]["data"]
