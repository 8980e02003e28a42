# Copyright (c) the d2_memfit developers.
import pytest
import torch

from d2_memfit.measure import items
from d2_memfit.measure.jobs import measure

pytestmark = pytest.mark.slow


def test_a_project_with_a_lazy_config_is_measured(tmp_path, monkeypatch):
    item = next(i for i in items.items_of(torch.device("cuda")) if i.config.endswith(".py"))
    file = tmp_path / item.project / "configs" / item.config
    file.parent.mkdir(parents=True)
    names = "model, optimizer, dataloader, train"
    file.write_text(f"from lazy_configs import lazy_config\n{names} = lazy_config().values()\n")
    monkeypatch.setattr(items, "_PROJECTS", tmp_path)
    cpu = torch.device("cpu")
    record = measure(item, {}, cpu, items.Scale.for_device(cpu))
    assert record["allocated_gb"] > 0
    assert "evaluation_allocated_gb" not in record
