"""Detectron2's ViTDet-B by a name, so that d2-memfit can estimate it.

PYTHONPATH=projects/ViTDet d2-memfit estimate --project vitdet_b:add_vitdet_b_config
"""

from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.modeling import META_ARCH_REGISTRY
from torch import nn

from d2_memfit.config_files import find_config_file


@META_ARCH_REGISTRY.register()  # type: ignore[untyped-decorator]
def ViTDetB(cfg: CfgNode) -> nn.Module:
    file = find_config_file("common/models/mask_rcnn_vitdet.py", ".py")
    return instantiate(LazyConfig.load(file).model)


def add_vitdet_b_config(cfg: CfgNode) -> None:
    """The model, and what its loader makes: images of 1024 x 1024 pixels with bit masks."""
    cfg.MODEL.META_ARCHITECTURE = "ViTDetB"
    cfg.MODEL.MASK_ON = True
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (1024,), 1024
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 1024, 1024
