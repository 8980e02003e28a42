# Copyright (c) the d2_memfit developers.
import logging
import re

import pytest
from detectron2.config import CfgNode
from tiny import ROOT, tiny_cfg

from d2_memfit import Job, estimate_memory, get_cfg, plan_memory
from d2_memfit.config.settings import check_settings
from d2_memfit.errors import ConfigError
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.plan import Ladder
from d2_memfit.techniques import (
    ORDER,
    TECHNIQUES,
    TIERS,
    Technique,
    apply_techniques,
    get_technique,
)
from d2_memfit.techniques.registry import PARTS

pytestmark = pytest.mark.slow

ALL = dict(sorted(TECHNIQUES))


@pytest.mark.parametrize("name", ALL)
def test_each_says_what_it_saves_and_costs_and_where_it_is_from(name):
    technique = ALL[name]
    assert technique.tier in TIERS
    assert technique.part in PARTS
    says = ["Saves", "Source:", *([] if technique.tier == "recipe" else ["Costs"])]
    assert bool(technique.changes) == (technique.tier != "exact")
    if name != "MixedPrecision":  # which is faster
        missing = [word for word in says if word not in (technique.__doc__ or "")]
        assert not missing, f"the docstring of {name} does not say {missing}"


def test_each_has_a_row_and_a_place_in_the_order_of_plans():
    page = (ROOT / "docs" / "TECHNIQUES.md").read_text()
    ordered = {*ORDER}
    for name, technique in ALL.items():
        assert f"`{name}`" in page, f"docs/TECHNIQUES.md has no row for {name}"
        assert name in ordered or not technique.in_plans, (
            f"{name} has no place in ORDER of techniques/registry.py, and not in_plans = False"
        )
    assert ordered <= ALL.keys(), "ORDER of techniques/registry.py has names of no technique"


@pytest.mark.parametrize("name", ALL)
def test_each_is_off_by_default_and_its_settings_turn_it_on(name):
    technique = ALL[name]
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.WEIGHTS = "weights.pth"
    cfg.INPUT.MIN_SIZE_TRAIN = (640, 800)
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 256
    cfg.TRANSFORMERS = CfgNode({"TYPE": "d_fine"})
    assert not technique.is_on(cfg)
    settings = technique.enabling_settings(cfg)
    assert settings, f"{name} has no enabling_settings for this config: no plan uses it"
    for key, value in settings.items():
        cfg.merge_from_list([key, value])
    check_settings(cfg)
    if technique.part != "config" or name == "HostBudget":
        assert technique.is_on(cfg)


def test_settings_are_empty_where_there_is_nothing_to_do():
    cfg = tiny_cfg("faster_rcnn")
    for name in ("ChunkedHeads", "PolygonMasks", "OneImageSize"):
        assert get_technique(name).enabling_settings(cfg) == {}


def test_an_unknown_name_is_an_error_that_lists_near_ones():
    with pytest.raises(ConfigError, match=r"technique 'ChunkedHead' \(did you mean ChunkedHeads"):
        get_technique("ChunkedHead")


def test_one_in_a_users_file_has_keys_and_is_applied(log):
    @TECHNIQUES.register()
    class Halving(Technique):
        tier, part = "recipe", "model"

        @classmethod
        def add_config(cls, cfg):
            cfg.MEMFIT.HALVING = False

        @classmethod
        def is_on(cls, cfg):
            return cfg.MEMFIT.HALVING

        @classmethod
        def apply(cls, number, cfg):
            return number / 2

    try:
        cfg = get_cfg()
        assert apply_techniques("model", 8, cfg) == 8
        assert not log.records
        cfg.MEMFIT.HALVING = True
        check_settings(cfg)
        assert apply_techniques("model", 8, cfg) == 4
        assert "Technique Halving (recipe) is on" in log.text
        assert log.records[0].levelno == logging.INFO
    finally:
        TECHNIQUES._obj_map.pop("Halving")


@pytest.fixture
def skeleton():
    """The technique of docs/TECHNIQUES.md, as it stands there."""
    page = (ROOT / "docs" / "TECHNIQUES.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(code, "TECHNIQUES.md", "exec"), names)
    yield names["MyTechnique"]
    TECHNIQUES._obj_map.pop("MyTechnique")


def test_the_skeleton_of_the_docs_works_and_is_planned(skeleton, monkeypatch, log):
    applied = []
    monkeypatch.setattr(skeleton, "apply", lambda model, cfg: applied.append(cfg) or model)
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.DATASETS.TEST, cfg.SOLVER.IMS_PER_BATCH = (), 1
    cfg.MEMFIT.MINE, cfg.MEMFIT.BUDGET_GB = True, 10
    check_settings(cfg)
    estimate_memory(cfg, device="cuda")
    assert applied
    cfg.MEMFIT.MINE = False
    lines = []
    plan_memory(cfg, 0.3, device="cuda", allow=["exact"], progress=lines.append)
    assert any("MyTechnique" in line for line in lines)  # it was tried


def test_a_technique_without_settings_is_not_planned(skeleton):
    """A plan tries what is usable, and what ``names`` has: see the test above."""
    start = DryJob(Job.from_cfg(tiny_cfg("faster_rcnn"), 1), DeviceModel.load("cuda"))
    assert Ladder(start, 6, ["exact"])._usable("exact")[-1] == "MyTechnique"
    del skeleton.enabling_settings
    assert "MyTechnique" not in Ladder(start, 6, ["exact"])._usable("exact")
