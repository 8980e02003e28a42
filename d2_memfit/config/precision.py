# Copyright (c) the d2_memfit developers.
"""The number formats of a training run: float32, float16 with a gradient scaler, or bfloat16."""

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode

from ..common.checks import check_device, choice
from ..common.errors import ConfigError

__all__ = ["Precision"]

logger = logging.getLogger(__name__)

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class Precision:
    """The number formats of forward, backward and optimizer step.

    On a GPU, float16 works as in Detectron2's ``AMPTrainer``.

    Args:
        name: "float32", "float16" or "bfloat16"; "fp32", "fp16" and "bf16" for short.
        device: device of the model.

    Raises:
        ConfigError: the name is none of these, or the device cannot compute in this format.
    """

    def __init__(self, name: str, device: Union[torch.device, str]) -> None:
        name = _SHORT.get(name, name)
        choice("float32", "float16", "bfloat16")("the precision", name)
        device = check_device(str(device))
        self.dtype: torch.dtype = getattr(torch, name)
        self.device_type = device.type
        self.scaler: Optional[torch.amp.GradScaler] = None
        if self.dtype != torch.float32:
            _check_device(name, device)
        if self.dtype == torch.float16:
            self.scaler = torch.amp.GradScaler(self.device_type)

    @classmethod
    def from_cfg(cls, cfg: CfgNode, device: Optional[str] = None) -> "Precision":
        """The precision from SOLVER.AMP.ENABLED and MEMFIT.AMP_DTYPE.

        Args:
            device: in place of MODEL.DEVICE.
        """
        name = cfg.MEMFIT.AMP_DTYPE if cfg.SOLVER.AMP.ENABLED else "float32"
        return cls(name, cfg.MODEL.DEVICE if device is None else device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss`` to the existing ones, scaled if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: torch.optim.Optimizer, iteration: int = 0) -> None:
        """Step with the complete gradients of an iteration. Call it once per iteration.

        Args:
            iteration: used in the warning about a skipped step.
        """
        if self.scaler is None:
            optimizer.step()
            return
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if (scale := self.scaler.get_scale()) < before:
            text = "Iteration %d: gradients overflowed float16. The step is skipped, and the loss "
            text += "scale is lowered to %g. If each iteration says so: MEMFIT.AMP_DTYPE bfloat16"
            logger.warning(text, iteration, scale)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state under Detectron2's key; empty without a scaler."""
        return {} if self.scaler is None else {"grad_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and "grad_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["grad_scaler"])
        elif self.scaler is not None:
            text = "The checkpoint was not trained in float16: the loss scale starts at %g"
            logger.warning(text, self.scaler.get_scale())


def _check_device(name: str, device: torch.device) -> None:
    if not torch.amp.is_autocast_available(device.type):
        raise ConfigError(
            f"MEMFIT.AMP_DTYPE {name}: PyTorch has no mixed precision on the device {device.type}. "
            "Set SOLVER.AMP.ENABLED False"
        )
    can_tell = name == "bfloat16" and device.type == "cuda" and torch.cuda.is_available()
    if can_tell and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            "MEMFIT.AMP_DTYPE bfloat16 needs a GPU of the Ampere generation or later, and this is "
            f"{torch.cuda.get_device_name(device)}. Set MEMFIT.AMP_DTYPE float16"
        )
