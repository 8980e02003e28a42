"""Mixed precision on the CPU with the number formats that it has on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..techniques.modules import replaced_functions

__all__ = ["casts_of_cuda"]

# "CUDA ops that can autocast to float32", of https://docs.pytorch.org/docs/stable/amp.html; on the
# CPU most of them stay in 16 bits.
_TO_FLOAT32 = {
    *("__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin"),
    *("binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cdist"),
    *("cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp"),
    *("expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log"),
    *("log10", "log_softmax", "log1p", "log2", "margin_ranking_loss", "mse_loss"),
    *("multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist"),
    *("poisson_nll_loss", "pow", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss"),
    *("soft_margin_loss", "softmax", "softmin", "softplus", "sum", "renorm", "tan"),
    *("triplet_margin_loss"),
}


@contextmanager
def casts_of_cuda() -> Iterator[None]:
    """While open, autocast on the CPU brings to float32 what it does on a GPU.

    The functions are replaced. A TorchFunctionMode would not do: PyTorch closes it in a backward,
    where checkpointed modules are computed again.
    """
    places = (torch, torch.nn.functional, torch.Tensor)
    with replaced_functions(places, dict.fromkeys(_TO_FLOAT32, _in_float32)):
        yield


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
