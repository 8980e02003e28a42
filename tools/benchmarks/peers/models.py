# Copyright (c) the d2_memfit developers.
"""The model that all sides train."""

import torch
from detectron2.modeling import build_model
from torch import nn
from torch.optim import Optimizer

from d2_memfit.config import load_cfg
from d2_memfit.techniques import apply_techniques

from ..common import CONFIG
from ..techniques import SMALL_ACTIVATIONS, exact_techniques_of_one_rank, settings


def mask_rcnn(learning_rate: float, exact: bool = False) -> tuple[nn.Module, Optimizer]:
    """Make Mask R-CNN R50-FPN with fixed random weights, and SGD with momentum.

    Args:
        exact: whether to apply d2_memfit's exact techniques for one device.
    """
    opts = settings(exact_techniques_of_one_rank()) if exact else []
    cfg = load_cfg(CONFIG, [*SMALL_ACTIVATIONS, *opts])
    cfg.MODEL.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = apply_techniques("model", build_model(cfg), cfg)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)
    return model, apply_techniques("optimizer", optimizer, cfg)
