# Copyright (c) the d2_memfit developers.
"""Mixed precision on the CPU with the number formats of a GPU."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ...common.patching import Groups
from ...compat.pytorch import tree_map

__all__ = ["casts_of_cuda"]

# Functions that compute in float32 on a GPU; on the CPU most of them stay in 16 bits. Python names
# of AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and norm in PyTorch's ATen/autocast_mode.h, and of
# functions made from them.
_TO_FLOAT32 = {
    *("__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin"),
    *("binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss"),
    *("cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1"),
    *("frobenius_norm", "group_norm", "hinge_embedding_loss", "huber_loss", "interpolate"),
    *("kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax"),
    *("logsumexp", "margin_ranking_loss", "matrix_norm", "mse_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "native_layer_norm", "nll_loss", "norm", "normalize"),
    *("nuclear_norm", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm"),
    *("rms_norm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin"),
    *("softplus", "sum", "tan", "triplet_margin_loss", "vector_norm"),
}


def casts_of_cuda() -> Groups:
    """For :func:`cuda_as_cpu`: make autocast on the CPU cast the same operators as on a GPU.

    The functions are replaced. A TorchFunctionMode does not work: PyTorch closes it in a backward,
    where checkpointed modules are computed again.
    """
    places = (torch, torch.linalg, torch.nn.functional, torch.Tensor)
    return [(places, dict.fromkeys(_TO_FLOAT32, _in_float32))]


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_to_float32, (args, kwargs))
        return function(*args, **kwargs)

    return run


def _to_float32(value: Any) -> Any:
    is_short = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_short else value
