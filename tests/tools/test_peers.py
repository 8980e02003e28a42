# Copyright (c) the d2_memfit developers.
"""The race of docs/BENCHMARK.md: its pages are what was measured, and each side is measured."""

import importlib.util
import shutil

import pytest
import torch
from benchmarks import peers
from benchmarks.peers import report
from tiny import ROOT

MODULES = {
    "Accelerate": "accelerate",
    "transformers": "transformers",
    "Lightning": "pytorch_lightning",
    "mmengine": "mmengine",
    "Composer": "composer",
    "d2_memfit": "d2_memfit",
}


def test_the_page_has_what_was_measured(tmp_path):
    (tmp_path / "docs").mkdir()
    for file in ("docs/BENCHMARK.md", "docs/benchmark.jsonl"):
        shutil.copy(ROOT / file, tmp_path / file)
    report.write(tmp_path)
    page = (ROOT / "docs/BENCHMARK.md").read_text()
    assert (tmp_path / "docs/BENCHMARK.md").read_text() == page, "tools/benchmark.py peers --report"


class Mean(torch.nn.Module):
    """A loss that is a mean over images."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, batch):
        return {"loss": torch.stack([(d["image"] @ self.weight) ** 2 for d in batch]).mean()}


@pytest.mark.parametrize("side", MODULES)
def test_the_gradient_of_a_step_is_that_of_all_its_images(side):
    if importlib.util.find_spec(MODULES[side]) is None:
        pytest.skip(f"{MODULES[side]} is not installed")
    images = [{"image": torch.tensor([1.0 + i, 2.0 - i])} for i in range(8)]
    full = peers.gradient("Detectron2", Mean(), images, (8, 1))
    found = peers.gradient(side, Mean(), images, (1, 8))
    torch.testing.assert_close(found, full)
    uneven = peers.gradient(side, Mean(), images, (3, 3))
    is_exact = torch.allclose(uneven, full, rtol=1e-4)
    assert is_exact == (side in ("d2_memfit", "Composer"))  # they know the images of the step
