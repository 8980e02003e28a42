# Copyright (c) the d2_memfit developers.
"""Which hooks the keys of MEMFIT.MONITOR turn on."""

import pytest
from tiny import tiny_cfg

from d2_memfit import get_cfg
from d2_memfit.config import check_config
from d2_memfit.engine.hooks import MONITORS, job_hooks
from d2_memfit.errors import ConfigError
from d2_memfit.job import Job

KEYS = list(get_cfg().MEMFIT.MONITOR)


def monitors(key=None, value=None):
    cfg = tiny_cfg("mask_rcnn")
    if key is not None:
        cfg.MEMFIT.MONITOR[key] = value
    check_config(cfg)
    return [type(hook) for hook in job_hooks(Job.from_cfg(cfg)) if isinstance(hook, MONITORS)]


def test_none_is_on_by_default():
    assert not monitors()


@pytest.mark.parametrize("key", KEYS)
def test_each_key_turns_one_on(key):
    is_bool = isinstance(get_cfg().MEMFIT.MONITOR[key], bool)
    assert len(monitors(key, True if is_bool else 40)) == 1, (
        f"MEMFIT.MONITOR.{key}: job_hooks makes no hook of MONITORS (engine/hooks/monitors.py)"
    )


@pytest.mark.parametrize("key", KEYS)
def test_a_value_that_cannot_work_is_an_error(key):
    try:
        monitors(key, 0.5)
    except ConfigError:
        return
    pytest.fail(f"MEMFIT.MONITOR.{key} 0.5 is taken: check it in check_monitor (config/config.py)")
