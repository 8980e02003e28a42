# Copyright (c) the d2_memfit developers.
import make_config_reference as reference
import pytest
from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg
from omegaconf import OmegaConf

from d2_memfit import get_cfg
from d2_memfit.cli import train_lazy
from d2_memfit.settings import cfg_of_lazy

KEYS = {key.name: key for key in reference.documented_keys()}


def leaves(cfg, prefix=""):
    for name, value in cfg.items():
        if isinstance(value, CfgNode):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_node_has_a_purpose():
    nodes = {name.rpartition(".")[0] for name in KEYS}
    missing = nodes - set(reference._PURPOSES)
    assert not missing, f"_PURPOSES of tools/make_config_reference.py has no line for {missing}"


def test_the_reference_is_up_to_date():
    assert reference.CONFIG_MD.read_text() == reference.reference(), (
        "docs/CONFIG.md is not what the comments say: run python tools/make_config_reference.py"
    )


def test_every_key_has_a_comment_and_a_row():
    ours = set(leaves(get_cfg())) - set(leaves(get_detectron2_cfg()))
    assert ours - set(KEYS) == set(), "write a comment above these keys"
    assert set(KEYS) - ours == set()
    rows = [r for r in reference.CONFIG_MD.read_text().splitlines() if r.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(ours), (
        "run python tools/make_config_reference.py"
    )


def test_types_are_those_that_the_keys_take():
    assert reference.kind("MEMFIT.MICRO_BATCH", None) == "int or None"
    assert reference.kind("MEMFIT.BUDGET_GB", None) == "number or None"
    assert reference.kind("MEMFIT.AMP_DTYPE", "float16") == "text"


@pytest.mark.parametrize("key", sorted(filter(reference.lazy_name, KEYS)))
def test_the_name_in_a_lazy_config_is_read(key):
    value = get_cfg()
    for name in key.split("."):
        value = value[name]
    train = {"amp": {"enabled": False}, "output_dir": "", "device": "cpu", "max_iter": 1}
    lazy = {"model": {}, "optimizer": {}, "train": train}
    lazy["dataloader"] = {"train": {"total_batch_size": 2}}
    lazy = OmegaConf.create(lazy)
    before = set(leaves(cfg_of_lazy(lazy)))
    name = reference.lazy_name(key)
    OmegaConf.update(lazy, name, value, force_add=True)
    assert set(leaves(cfg_of_lazy(lazy))) == before  # unknown keys are errors
    if name.split(".")[1] not in ("memfit", "oom"):
        assert f"{name} " in train_lazy.__doc__
