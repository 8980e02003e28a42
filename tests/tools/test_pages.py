# Copyright (c) the d2_memfit developers.
"""Parts of pages that tools write."""

import make_config_reference as reference
import make_readme_table
import pytest
from benchmarks import guide
from detectron2.config import get_cfg as get_detectron2_cfg
from omegaconf import OmegaConf
from pages import section

from d2_memfit import get_cfg
from d2_memfit.common.checks import value_of
from d2_memfit.config.keys import all_keys, leaves
from d2_memfit.config.lazy import cfg_of_lazy, lazy_name

KEYS = list(all_keys())


def test_the_reference_is_up_to_date():
    assert section(reference.CONFIG_MD, "keys", reference.TOOL) == reference.reference(), (
        "run python tools/make_config_reference.py"
    )


def test_every_key_has_a_row_with_a_text_and_a_default_that_passes_its_check():
    ours = {*dict(leaves(get_cfg()))} - {*dict(leaves(get_detectron2_cfg()))}
    assert sorted(key.name for key in KEYS) == sorted(ours)
    for key in KEYS:
        key.check(key.name, key.default)
        assert len(key.text) > 30


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_the_name_in_a_lazy_config_is_read(key):
    train = {"output_dir": "", "device": "cpu", "max_iter": 1}
    lazy = {"model": {"a": 1}, "optimizer": {"a": 1}, "train": train}
    lazy = OmegaConf.create({**lazy, "dataloader": {"train": {"total_batch_size": 2}}})
    value = 7 if key.default in (None, 1) and key.default is not True else key.default
    OmegaConf.update(lazy, lazy_name(key.name), value, force_add=True)
    assert value_of(cfg_of_lazy(lazy), key.name) == value


def test_all_jobs_are_in_the_table_of_the_readme():
    rows = section(make_readme_table.README, "jobs", "make_readme_table.py").splitlines()[2:]
    named = [row.split("|")[1].strip().partition(",")[0] for row in rows]
    assert named == [name for name, *_ in make_readme_table.JOBS]


@pytest.mark.slow
def test_the_page_for_those_who_ran_out_of_memory_has_what_the_planner_says():
    lines = section(guide.PAGE, "tries", guide.TOOL).splitlines()
    assert [line.partition(".")[0] for line in lines if line[2:3].isdigit()] == [
        f"| {number}" for number in range(1, len(guide.TRIES) + 1)
    ]
    assert {*guide.tries(range(2, 6, 3)).splitlines()} <= {*lines}
