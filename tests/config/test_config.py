# Copyright (c) the d2_memfit developers.
import time

import pytest
import yaml
from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg

from d2_memfit import add_memfit_config, get_cfg
from d2_memfit.common.errors import ConfigError, ConfigErrors
from d2_memfit.config.files import DETECTRON2_ZOO
from d2_memfit.config.load import load_cfg, with_memfit_keys, with_settings
from d2_memfit.config.settings import check_settings


def test_get_cfg_is_detectron2s_plus_our_keys():
    cfg = get_cfg()
    assert cfg.SOLVER.ACCUMULATION_STEPS == 1
    del cfg.SOLVER["ACCUMULATION_STEPS"]
    del cfg["MEMFIT"]
    assert cfg == get_detectron2_cfg()


def test_keys_that_are_there_keep_their_values():
    cfg = get_cfg()
    cfg.SOLVER.ACCUMULATION_STEPS = 4
    cfg.MEMFIT.MICRO_BATCH = 2
    add_memfit_config(cfg)
    assert cfg.SOLVER.ACCUMULATION_STEPS == 4
    assert cfg.MEMFIT.MICRO_BATCH == 2


def test_a_frozen_config_is_not_changed():
    cfg = get_detectron2_cfg()
    cfg.freeze()
    with pytest.raises(AttributeError, match="immutable"):
        add_memfit_config(cfg)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MEMFIT.MICROBATCH", "2"),
        ("solver.ims_per_batch", "2"),
        ("INPUT.MIN_SIZE_TRAIN", "640"),
        ("MEMFIT.OOM.ALLOW_RESIZE", "True"),
    ],
)
def test_a_wrong_override_is_answered_with_the_right_one(prose, key, value):
    with pytest.raises(ConfigError, match=key) as e:
        load_cfg("", [key, value])
    prose(str(e.value))


@pytest.mark.parametrize("text", ["open(1)", "[].__class__"])
def test_code_in_a_file_is_not_run(prose, tmp_path, text):
    file = tmp_path / "wrong.yaml"
    later = f'SEED: !!python/object/apply:os.mkdir ["{tmp_path}/made"]\n'
    file.write_text(f'OUTPUT_DIR: !!python/object/apply:eval ["{text}"]\n{later}')
    with pytest.raises(ConfigError, match=str(file)) as e:
        load_cfg(str(file))
    prose(str(e.value))
    assert not (tmp_path / "made").exists()


def test_every_config_of_detectron2s_zoo_loads_without_running_code():
    folder = DETECTRON2_ZOO
    files = sorted(folder.rglob("*.yaml"))
    assert len(files) > 80
    for file in files:
        expected = get_detectron2_cfg()
        expected.merge_from_file(str(file))
        cfg = load_cfg(str(file))
        del cfg.SOLVER["ACCUMULATION_STEPS"]
        del cfg["MEMFIT"]
        assert cfg == expected, file
    with pytest.raises(yaml.constructor.ConstructorError):
        yaml.safe_load('!!python/object/apply:eval ["1 + 1"]')  # elsewhere it stays an error


def test_all_that_is_wrong_in_file_and_command_is_said_at_once(prose, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text("SEED: one\nNO_SUCH: 1\nMEMFIT: {OOM: {POLICY: never}}\n")
    opts = ["SOLVER.MAX_ITER", 10**30, "SOLVER.BASE_LR", "1e999", "MEMFIT.MICRO_BATCH", 0]
    start = time.perf_counter()
    with pytest.raises(ConfigErrors) as e:
        load_cfg(str(file), [*opts, "SOLVER.IMS_PER_BATCH", 99999999999, "MODEL", "x"])
    assert time.perf_counter() - start < 1
    lines = str(e.value).split("\n")
    wrong = ["SEED", "NO_SUCH", "MEMFIT.OOM.POLICY", *opts[::2], "SOLVER.IMS_PER_BATCH", "MODEL"]
    assert len(lines) == len(wrong)
    assert all(any(key in line for line in lines) for key in wrong)
    prose(str(e.value))


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.MAX_ITER", 10**30),
        ("SOLVER.IMS_PER_BATCH", 99999999999),
        ("SOLVER.ACCUMULATION_STEPS", 10**9),
        ("SOLVER.BASE_LR", NAN),
        ("MODEL.PIXEL_STD", [1.0, NAN, 1.0]),
        ("MODEL.ANCHOR_GENERATOR.SIZES", [[32, -INFINITY]]),
        ("MEMFIT.BUDGET_GB", NAN),
        ("MEMFIT.MICRO_BATCH", INFINITY),
    ],
)
def test_numbers_that_are_not_finite_or_too_large_are_refused(prose, key, value):
    with pytest.raises(ConfigError, match=key) as e:
        check_settings(with_settings(get_cfg(), {key: value}))
    prose(str(e.value))


def test_a_key_of_a_project_may_be_infinite_but_not_nan():
    cfg = get_cfg()
    cfg.MODEL.SIZES_OF_INTEREST = [[-1, 64], [64, INFINITY]]  # as OneNet's
    check_settings(cfg)
    cfg.MODEL.SIZES_OF_INTEREST[0][0] = NAN
    with pytest.raises(ConfigError, match=r"MODEL\.SIZES_OF_INTEREST"):
        check_settings(cfg)


def test_unknown_keys_are_found_that_no_merge_has_seen(prose):
    cfg = get_cfg()
    cfg.MEMFIT.MICROBATCH = 1
    with pytest.raises(ConfigError, match=r"MEMFIT\.MICROBATCH") as e:
        check_settings(cfg)
    prose(str(e.value))


@pytest.mark.parametrize("value", [5.5, "auto", None, 7])
def test_a_budget_on_the_command_line_may_be_of_another_type_than_in_the_file(tmp_path, value):
    file = tmp_path / "config.yaml"
    file.write_text("MEMFIT: {BUDGET_GB: 6, MICRO_BATCH: 2}\n")
    cfg = load_cfg(str(file), ["MEMFIT.BUDGET_GB", str(value), "MEMFIT.MICRO_BATCH", "None"])
    assert value == cfg.MEMFIT.BUDGET_GB
    assert cfg.MEMFIT.MICRO_BATCH is None
    check_settings(cfg)


def test_a_config_of_a_projects_own_class_gets_nodes_of_that_class():
    class OwnNode(CfgNode):
        """As d2go's, which does not merge with others."""

    own = OwnNode(get_detectron2_cfg())
    add_memfit_config(own)
    assert type(own.MEMFIT.OOM) is OwnNode
    own.merge_from_other_cfg(OwnNode({"MEMFIT": {"OOM": {"POLICY": "split"}}}))
    assert with_memfit_keys(own).MEMFIT.OOM.POLICY == "split"
