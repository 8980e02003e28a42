# Copyright (c) the d2_memfit developers.
import pytest
import torch
from torch import nn

from d2_memfit import get_cfg
from d2_memfit.errors import ConfigError
from d2_memfit.techniques import ADAPTERS, Adapter, get_technique


class Pairs(nn.Module):
    """A project's own head that compares all objects with each other."""

    def distances(self, objects):
        return torch.cdist(objects, objects).sum(1)

    def forward(self, objects):
        return self.distances(objects).sum()


class PairsOfFew(Adapter):
    technique = "ChunkedHeads"
    attribute = "pairs_at_a_time"

    @classmethod
    def find_in(cls, model, key):
        return [module for module in model.modules() if isinstance(module, Pairs)]

    def distances(self, objects):
        parts = objects.split(self.pairs_at_a_time)
        return torch.cat([torch.cdist(part, objects).sum(1) for part in parts])


def test_a_project_registers_its_own_adapter(monkeypatch):
    cfg = get_cfg()
    cfg.MEMFIT.HEADS.CHUNK_SIZE = 3
    technique = get_technique("ChunkedHeads")
    model = nn.Sequential(Pairs())
    with pytest.raises(ConfigError, match=r"the model has no mask or keypoint head .* Set it None"):
        technique.apply(model, cfg)
    monkeypatch.setitem(ADAPTERS._obj_map, "PairsOfFew", PairsOfFew)
    objects = torch.rand(10, 4)
    expected = model(objects)
    assert technique.apply(model, cfg) is model
    assert isinstance(model[0], PairsOfFew)
    torch.testing.assert_close(model(objects), expected)
