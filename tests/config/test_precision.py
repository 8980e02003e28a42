# Copyright (c) the d2_memfit developers.
import pytest
import torch

from d2_memfit import get_cfg
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.settings import Precision


@pytest.mark.parametrize(
    ("enabled", "amp_dtype", "dtype", "has_scaler"),
    [
        (False, "float16", torch.float32, False),
        (True, "float16", torch.float16, True),
        (True, "bfloat16", torch.bfloat16, False),
    ],
)
def test_the_config_chooses_the_precision(enabled, amp_dtype, dtype, has_scaler):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.AMP.ENABLED = enabled
    cfg.MEMFIT.AMP_DTYPE = amp_dtype
    precision = Precision.from_cfg(cfg)
    assert precision.dtype == dtype
    assert precision.scaler.is_enabled() is has_scaler


def test_float32_leaves_autocast_as_it_is():
    with torch.autocast("cpu", dtype=torch.bfloat16), Precision("float32", "cpu").autocast():
        assert torch.is_autocast_enabled("cpu")


def test_a_precision_that_is_unknown_is_named():
    with pytest.raises(ConfigError, match="float8"):
        Precision("float8", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bfloat16_is_refused_by_gpus_that_would_emulate_it():
    if torch.cuda.get_device_capability() >= (8, 0):
        Precision("bfloat16", "cuda")
    else:
        with pytest.raises(ConfigError, match=r"Set MEMFIT.AMP_DTYPE float16"):
            Precision("bfloat16", "cuda")
