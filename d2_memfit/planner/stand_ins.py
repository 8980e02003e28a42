# Copyright (c) the d2_memfit developers.
"""CUDA on the CPU, where a dry run has its tensors: calls, autocast and compiled operators."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchvision.ops import deform_conv2d

from ..common.compat import DeviceContext, constructors, know_as_builtin, tree_map
from ..common.patching import Group, replaced_functions, with_original

__all__ = ["casts_of_cuda", "compiled_operators", "cuda_as_cpu"]

deform_conv = import_module("detectron2.layers.deform_conv")  # a function has this name, too


@contextmanager
def cuda_as_cpu(*others: Group) -> Iterator[None]:
    """While open, CUDA is the CPU for code in Python.

    ``.cuda()``, ``.to("cuda")``, ``device="cuda"``, autocast for CUDA, streams and the like do on
    the CPU what they would do on a GPU. Without a dtype, such an autocast uses float16.

    A machine with a GPU behaves the same, because a dry run has its model on the CPU there too.
    ``torch.cuda.is_available()`` still tells the truth, as do queries of a GPU's properties. An
    autocast made earlier, as a decorator, counts if it disables. One that enables cannot be told
    apart: without a GPU, PyTorch makes it one that disables.

    Functions are replaced. A TorchFunctionMode would cost time in every call of PyTorch, and
    PyTorch closes it in a backward.

    Args:
        others: other stand-ins of a dry run, which are open for the same time.
    """
    cuda: list[Group] = [([place], replacements) for place, replacements in _replacements()]
    with replaced_functions(*cuda, *others):
        yield


def _replacements() -> list[tuple[Any, dict[str, Callable[[Any], Any]]]]:
    """Places, and for each name there a function that makes the replacement from the original."""
    autocast, cuda = torch.amp.autocast_mode, torch.cuda
    return [
        (torch.Tensor, dict.fromkeys(_METHODS, _on_cpu)),
        (torch.Tensor, {"cuda": _keep, "pin_memory": _keep, "record_stream": _answer(None)}),
        (torch, dict.fromkeys(_FUNCTIONS, _on_cpu)),
        (DeviceContext, {"__init__": _on_cpu}),  # with torch.device("cuda")
        (torch, {"is_autocast_enabled": _asked_of_cpu, "get_autocast_dtype": _on_cpu}),
        (torch, {"get_autocast_gpu_dtype": lambda _: lambda: torch.get_autocast_dtype("cpu")}),
        (autocast, {"_cast": _on_cpu}),  # for custom_fwd
        (
            autocast.autocast,
            {"__init__": _init_autocast, "__enter__": _enter_autocast, "__exit__": _exit_autocast},
        ),
        (cuda, dict.fromkeys(_ACTIONS, _answer(None))),
        (cuda, dict.fromkeys(_NUMBERS, _answer(0))),
        (cuda, dict.fromkeys(("current_stream", "default_stream"), _answer(_Stream()))),
        (cuda, dict.fromkeys(("Stream", "Event"), _other(_Stream))),
        (cuda, dict.fromkeys(("device", "device_of", "stream"), _answer(nullcontext()))),
        (torch, {"compile": _other(_not_compiled)}),
        (DistributedDataParallel, {"__init__": _without_devices}),
    ]


# Asked at import: PyTorch keeps the answer, which must not contain our functions.
_CONSTRUCTORS = {f.__name__ for f in constructors()}
_LIKE = {f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
_FUNCTIONS = _CONSTRUCTORS | _LIKE | {"load", "normal"}
_METHODS = ("to", "new", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_ACTIONS = (
    *("empty_cache", "init", "ipc_collect", "reset_max_memory_allocated"),
    *("reset_max_memory_cached", "reset_peak_memory_stats", "set_device", "set_stream"),
    "synchronize",
)
_NUMBERS = (
    *("current_device", "max_memory_allocated", "max_memory_cached", "max_memory_reserved"),
    *("memory_allocated", "memory_cached", "memory_reserved"),
)


@cache
def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that every GPU among its arguments becomes the CPU."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), int):  # a GPU's number
            kwargs["device"] = "cpu"
        if function is _TENSOR_TO and len(args) > 1 and type(args[1]) is int:
            args = args[0], "cpu", *args[2:]
        return function(*map(_as_cpu, args), **{k: _as_cpu(v) for k, v in kwargs.items()})

    know_as_builtin(run, function)
    return run


_TENSOR_TO = torch.Tensor.to


def _as_cpu(value: Any) -> Any:
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else value
    is_gpu = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_gpu else value


def _other(value: Any) -> Callable[[Any], Any]:
    """A factory that ignores the original and returns ``value``."""
    return lambda _: value


def _answer(value: Any) -> Callable[[Any], Any]:
    # Each name gets a function of its own: PyTorch's compiler, if it is imported, asks for that.
    return lambda _: lambda *args, **kwargs: value


def _keep(_: Any) -> Callable[..., torch.Tensor]:
    return lambda tensor, *args, **kwargs: tensor


def _without_devices(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor of ``DistributedDataParallel``, which takes no numbers of devices on a CPU."""
    none = {"device_ids": None, "output_device": None}
    return lambda self, module, *_, **kwargs: init(self, module, **{**kwargs, **none})


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """``torch.compile`` that changes nothing: PyTorch's compiler would see our functions."""
    return (lambda model: model) if model is None else model


def _asked_of_cpu(function: Callable[[str], bool]) -> Callable[..., bool]:
    return lambda device_type="cpu": function(_as_cpu(device_type))


@with_original
def _init_autocast(
    init: Any, self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    if _as_cpu(device_type) != device_type:
        device_type, dtype = "cpu", dtype or torch.float16
    init(self, device_type, dtype, *args, **kwargs)


@with_original
def _enter_autocast(enter: Any, self: Any) -> Any:
    self.device_outside, self.device = self.device, _as_cpu(self.device)
    return enter(self)


@with_original
def _exit_autocast(leave: Any, self: Any, *error: Any) -> Any:
    result = leave(self, *error)
    self.device = self.__dict__.pop("device_outside", self.device)
    return result


class _Stream:
    """A stream or an event that nobody waits for."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_Stream"]:
        return lambda *args, **kwargs: self

    def elapsed_time(self, _: "_Stream") -> float:
        return 0.0

    def query(self) -> bool:
        return True


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


def casts_of_cuda() -> Group:
    """For :func:`cuda_as_cpu`: make autocast on the CPU cast the same operators as on a GPU.

    The functions are replaced. A TorchFunctionMode does not work: PyTorch closes it in a backward,
    where checkpointed modules are computed again.
    """
    places = (torch, torch.linalg, torch.nn.functional, torch.Tensor)
    return places, dict.fromkeys(_TO_FLOAT32, _in_float32)


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


def compiled_operators() -> list[Group]:
    """For :func:`cuda_as_cpu`: compiled operators with the same allocations as on a GPU.

    They compute no values. Deformable convolution is torchvision's operator, which has a meta
    kernel. Its weights are those of Detectron2's modules. Deformable attention is that of
    Deformable DETR, which other projects have by the same name.
    """
    convolve, modulated = _other(_convolve), _other(_convolve_modulated)
    groups: list[Group] = [
        ([deform_conv], {"deform_conv": convolve, "modulated_deform_conv": modulated})
    ]
    if file := sys.modules.get("MultiScaleDeformableAttention"):
        forward, backward = _other(_attend), _other(_attend_backward)
        names = {"ms_deform_attn_forward": forward, "ms_deform_attn_backward": backward}
        groups.append(([file], names))
    return groups


def _convolve(x: Any, offset: Any, weight: Any, *settings: Any) -> torch.Tensor:
    return deform_conv2d(x, offset, weight, None, *settings[:3])  # stride, padding, dilation


def _convolve_modulated(
    x: Any, offset: Any, mask: Any, weight: Any, bias: Any, *settings: Any
) -> torch.Tensor:
    return deform_conv2d(x, offset, weight, bias, *settings[:3], mask)


def _attend(
    value: torch.Tensor, sizes: Any, starts: Any, locations: torch.Tensor, *args: Any
) -> torch.Tensor:
    """Deformable attention without values.

    Args:
        value: [images, pixels, heads, channels].
        locations: [images, queries, heads, levels, points, 2].
    """
    return value.new_zeros(*locations.shape[:2], math.prod(value.shape[2:]))


def _attend_backward(
    value: Any, sizes: Any, starts: Any, locations: Any, weights: Any, *args: Any
) -> Any:
    return torch.zeros_like(value), torch.zeros_like(locations), torch.zeros_like(weights)
