# Copyright (c) the d2_memfit developers.
"""Which hooks the keys of MEMFIT.MONITOR turn on."""

import pytest
from tiny import ROOT, tiny_cfg

from d2_memfit import get_cfg
from d2_memfit.engine import GatherStates
from d2_memfit.engine.hooks import job_hooks
from d2_memfit.engine.hooks.peak_recorder import PeakRecorder
from d2_memfit.errors import ConfigError
from d2_memfit.job import Job
from d2_memfit.settings import check_settings

KEYS = list(get_cfg().MEMFIT.MONITOR)


def hooks_of(cfg):
    return [type(hook) for hook in job_hooks(Job.from_cfg(cfg))]


def monitors(key, value):
    """The hooks that a key turns on."""
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    default = hooks_of(cfg)
    cfg.MEMFIT.MONITOR[key] = value
    check_settings(cfg)
    return [hook for hook in hooks_of(cfg) if hook not in default]


def test_none_is_on_by_default():
    assert hooks_of(tiny_cfg("mask_rcnn", fpn=False)) == [GatherStates, PeakRecorder]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_turns_one_on(key):
    is_bool = isinstance(get_cfg().MEMFIT.MONITOR[key], bool)
    assert len(monitors(key, True if is_bool else 40)) == 1, (
        f"MEMFIT.MONITOR.{key} turns no hook on: make it in job_hooks (engine/hooks/monitors.py)"
    )


@pytest.mark.parametrize("key", KEYS)
def test_each_key_has_a_row(key):
    page = (ROOT / "docs" / "MONITORING.md").read_text()
    assert f"| `MEMFIT.MONITOR.{key}` |" in page, f"docs/MONITORING.md has no row for {key}"


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_cannot_work_is_an_error(key):
    try:
        monitors(key, 0.5)
    except ConfigError:
        return
    pytest.fail(f"MEMFIT.MONITOR.{key} 0.5 is taken: add a check (settings/key_checks.py)")
