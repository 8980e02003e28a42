# Copyright (c) the d2_memfit developers.
import re
from collections import namedtuple

import pytest
import torch
from detector_parts import Block
from detectron2.config import LazyCall as L
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from detectron2.solver.build import get_default_optimizer_params
from omegaconf import OmegaConf
from tiny import ROOT, images, tiny_cfg, tiny_model
from torch import nn

from d2_memfit import Job, get_cfg, plan_memory
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.settings import check_settings
from d2_memfit.techniques.registry import (
    TECHNIQUES,
    TIERS,
    apply_techniques,
    get_technique,
    techniques_on,
)

NAMES = [technique.name for technique in TECHNIQUES]
OF_YACS = [t.name for t in TECHNIQUES if t.tier == "recipe" and not t.key]


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_saves_and_costs_and_where_it_is_from(name):
    technique = get_technique(name)
    assert technique.tier in TIERS
    assert technique.part in ("config", "model", "optimizer", "loader", "evaluation")
    assert technique.needs <= {"gpu", "ranks", "float16", "evaluation"}
    assert bool(technique.changes) == (technique.tier != "exact")
    says = ["Saves", "Source:", *(["Key: "] if technique.key else [])]
    for word in says + ([] if technique.tier == "recipe" else ["Costs"]):
        assert word in technique.__doc__, f"the docstring of {name} does not say {word}"
    page = (ROOT / "docs" / "TECHNIQUES.md").read_text()
    assert f"`{name}`" in page, f"docs/TECHNIQUES.md has no row for {name}"


WRONG = {bool: [1, "yes"], list: [[1], "backbone", 3], type(None): [0, -3, "all", 2.5, True]}


@pytest.mark.parametrize("name", [t.name for t in TECHNIQUES if t.key])
def test_each_is_off_by_default_and_wrong_values_are_errors(name):
    technique, cfg = get_technique(name), get_cfg()
    assert not technique.is_on(cfg)
    for value in WRONG[type(technique.off)][: 3 if name == "HostBudget" else None]:
        cfg = get_cfg()
        *parents, leaf = technique.key.split(".")
        node = cfg
        for parent in parents:
            node = node[parent]
        node[leaf] = value
        message = re.escape(f"{value!r}")
        with pytest.raises(ConfigError, match=f"{technique.key} must be .* got {message}"):
            check_settings(cfg)


class DetrLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 16, 16)
        self.encoder = nn.ModuleList([Block(16), Block(16)])

    def prepare_for_cdn(self, targets):
        """Make the denoising queries, as in detrex."""

    def forward(self, batch):
        self.prepare_for_cdn(batch)


class ViT(Backbone):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([Block(16), Block(16)])

    def forward(self, x):
        pass

    def output_shape(self):
        return {}


def make(family):
    if family == "DetrLike":
        return DetrLike()
    model = tiny_model(tiny_cfg("retinanet" if family == "RetinaNet_" else "mask_rcnn"))
    if family == "ViTDet":
        model.backbone = ViT()
    return model


FAMILIES = ["MaskRCNN_", "RetinaNet_", "DetrLike", "ViTDet"]
for name in FAMILIES:
    META_ARCH_REGISTRY.register(type(name, (), {"__new__": lambda cls, cfg: make(cls.__name__)}))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def jobs(family):
    """The same model as all kinds of jobs."""
    batch = images(2)
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.DEVICE, cfg.MODEL.WEIGHTS = family, "cpu", "model.pth"
    cfg.SOLVER.IMS_PER_BATCH = 2
    yield "yaml", Job.from_cfg(cfg, 1, batch=batch)
    train = {"max_iter": 9, "device": "cpu", "output_dir": "output", "init_checkpoint": "model.pth"}
    params = L(get_default_optimizer_params)(base_lr=0.1)
    lazy = {
        "model": L(make)(family=family),
        "optimizer": L(torch.optim.SGD)(params=params, lr=0.1, momentum=0.9),
        "dataloader": {"train": {"total_batch_size": 2}},
        "train": train,
    }
    lazy = OmegaConf.create(lazy, flags={"allow_objects": True})
    yield "LazyConfig", Job.from_lazy(lazy, 1, batch=batch)
    pieces = {"model": lambda: make(family), "optimizer": optimizer_of, "device": "cpu"}
    yield "Job", Job(**pieces, images_per_batch=2, ranks=1, batch=batch)


OFFERED = {
    "MaskRCNN_": {"ChunkedMatching", "EvaluationOnHost", "ChunkedHeads", "FrozenModules"},
    "RetinaNet_": {"ChunkedMatching", "EvaluationOnHost", "FrozenModules"},
    "DetrLike": {"DenoisingQueries", "FrozenModules"},
    "ViTDet": {"ChunkedMatching", "EvaluationOnHost", "ChunkedHeads", "FrozenModules"},
}
ALWAYS = {"PackedMasks", "ShardedOptimizerStates", "ActivationCheckpointing", "ActivationOffload"}
ALWAYS |= {"MixedPrecision", "EightBitOptimizerStates"}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_kinds_of_jobs_are_offered_the_same(family):
    for kind, job in jobs(family):
        model = job.build_model("cpu")
        settings = {t.name: t.settings(job, model) for t in TECHNIQUES}
        offered = {name for name, found in settings.items() if found} - {*OF_YACS}
        assert offered == ALWAYS | OFFERED[family], kind
        changed = job
        for name in offered:
            changed = changed.with_settings(settings[name])  # an error where there is no such key
        on = {t.name for t in TECHNIQUES if t.is_on(changed.cfg)}
        assert on == offered - {"MixedPrecision"}


@pytest.fixture
def mine():
    """The technique of docs/CONTRIBUTING.md: one file, and one entry in the list."""
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text().partition("### A technique\n")[2]
    names = {}
    exec(re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1], names)
    technique = names["MyTechnique"]()
    TECHNIQUES.append(technique)
    yield technique
    TECHNIQUES.remove(technique)


def test_a_new_one_has_a_key_and_is_applied_and_planned(mine, monkeypatch, log):
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 1
    monkeypatch.setattr(type(mine), "apply", lambda self, model, value: (model, value))
    assert apply_techniques("model", 8, cfg) == 8
    assert not log.records
    cfg.MEMFIT.MINE = True
    check_settings(cfg)
    assert apply_techniques("model", 8, cfg) == (8, True)
    assert "Technique MyTechnique (exact) is on" in log.text
    monkeypatch.undo()
    cfg.MEMFIT.MINE = False
    lines = []
    plan_memory(
        cfg, 0.3, device="cuda", allow=["exact"], batch=images(1), evaluates=False,
        progress=lines.append,
    )  # fmt: skip
    assert any("MyTechnique" in line for line in lines)  # it was tried


def test_what_is_trained_is_decided_first():
    cfg = tiny_cfg()
    cfg.MEMFIT.FINE_TUNE.FROZEN, cfg.MEMFIT.CHECKPOINT.MODULES = ["backbone"], ["all"]
    names = [technique.name for technique in techniques_on("model", cfg)]
    assert names == ["FrozenModules", "ActivationCheckpointing"]


@pytest.mark.parametrize("name", ["targets", "mask_labels"])
def test_masks_in_a_column_of_a_batch_are_packed(name):
    (data,) = images(1)
    masks = data["instances"].gt_masks.tensor
    columns = namedtuple("Columns", ["pixels", name])
    batch = columns([data["image"]], [masks if name == "mask_labels" else {"masks": masks}])
    pieces = {"model": lambda: make("DetrLike"), "optimizer": optimizer_of, "device": "cpu"}
    for given in (batch, tuple(batch)):
        offered = get_technique("PackedMasks").suggest(Job(**pieces, ranks=1, batch=given), None)
        assert offered == (True if given is batch or name == "targets" else None)
