# Copyright (c) the d2_memfit developers.
"""The projects of the table. Their trees come from their repositories; none is included here."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Optional

from detectron2.config import LazyConfig

from d2_memfit import Job

from .dataset import register_dataset
from .project import DATASET, Project

__all__ = ["PROJECTS", "made"]

_DETECTRON2 = "https://github.com/facebookresearch/detectron2/tree/main/projects"
_FEW_ROIS = (
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16, "MODEL.RPN.PRE_NMS_TOPK_TRAIN", 200),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", 40, "MODEL.RPN.POST_NMS_TOPK_TEST", 20),
    *("TEST.DETECTIONS_PER_IMAGE", 10),
)


def _adelai(name: str, config_file: str, *small: Any) -> Project:
    return Project(
        name,
        tree="AdelaiDet",
        url="https://github.com/aim-uofa/AdelaiDet",
        config_file=config_file,
        paths=("tools", "."),
        get_cfg="adet.config:get_cfg",
        small=small,
        stubs=("adet._C",),
    )


def _detectron2(name: str, config_file: str, **kwargs: Any) -> Project:
    return Project(name, name, f"{_DETECTRON2}/{name}", config_file, **kwargs)


PROJECTS = (
    _adelai(
        "AdelaiDet FCOS",
        "configs/FCOS-Detection/R_50_1x.yaml",
        *("MODEL.FCOS.POST_NMS_TOPK_TEST", 20),
    ),
    _adelai(
        "AdelaiDet CondInst",
        "configs/CondInst/MS_R_50_1x.yaml",
        *("MODEL.FCOS.POST_NMS_TOPK_TEST", 20),
    ),
    _adelai(
        "AdelaiDet BoxInst",
        "configs/BoxInst/MS_R_50_1x.yaml",
        *("MODEL.FCOS.POST_NMS_TOPK_TEST", 20),
    ),
    _adelai("AdelaiDet SOLOv2", "configs/SOLOv2/R50_3x.yaml"),
    Project(
        "DETR",
        tree="detr",
        url="https://github.com/facebookresearch/detr",
        config_file="d2/configs/detr_256_6_6_torchvision.yaml",
        paths=("d2", "."),
        add=("d2.detr:add_detr_config",),
        small=("INPUT.CROP.SIZE", (64, 96), "MODEL.DETR.NUM_OBJECT_QUERIES", 10),
    ),
    Project(
        "Sparse R-CNN",
        tree="SparseR-CNN",
        url="https://github.com/PeizeSun/SparseR-CNN",
        config_file="projects/SparseRCNN/configs/sparsercnn.res50.100pro.3x.yaml",
        paths=("projects/SparseRCNN",),
        add=("sparsercnn:add_sparsercnn_config",),
        small=("INPUT.CROP.SIZE", (64, 96), "MODEL.SparseRCNN.NUM_PROPOSALS", 10),
        patches=(("torchvision:__version__", "1.0"),),  # it compares only three letters
    ),
    _detectron2(
        "DeepLab",
        "configs/Cityscapes-SemanticSegmentation/deeplab_v3_plus_R_103_os16_mg124_poly_90k_bs16.yaml",
        add=("detectron2.projects.deeplab:add_deeplab_config",),
        opts=("MODEL.RESNETS.NORM", "BN", "MODEL.SEM_SEG_HEAD.NORM", "BN"),
        small=(
            *("INPUT.CROP.SIZE", (96, 96), "MODEL.RESNETS.DEPTH", 50, "INPUT.MIN_SIZE_TEST", 192),
            *("INPUT.MAX_SIZE_TEST", 192),
        ),
        data="sem_seg",
    ),
    _detectron2(
        "Panoptic-DeepLab",
        "configs/Cityscapes-PanopticSegmentation/"
        "panoptic_deeplab_R_52_os16_mg124_poly_90k_bs32_crop_512_1024.yaml",
        add=("detectron2.projects.panoptic_deeplab:add_panoptic_deeplab_config",),
        opts=(
            *("MODEL.RESNETS.NORM", "BN", "MODEL.SEM_SEG_HEAD.NORM", "BN"),
            *("MODEL.INS_EMBED_HEAD.NORM", "BN"),
        ),
        small=(
            *("INPUT.CROP.SIZE", (64, 64), "INPUT.MIN_SIZE_TEST", 192),
            *("INPUT.MAX_SIZE_TEST", 192),
        ),
        data="panoptic",
    ),
    _detectron2(
        "DensePose",
        "configs/densepose_rcnn_R_50_FPN_s1x.yaml",
        add=("densepose:add_densepose_config",),
        small=_FEW_ROIS,
        data="densepose",
        stubs=("av",),
    ),
    _detectron2(
        "TridentNet",
        "configs/tridentnet_fast_R_50_C4_1x.yaml",
        add=("tridentnet:add_tridentnet_config",),
        small=(*_FEW_ROIS, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 8),
    ),
    Project(
        "CenterMask2",
        tree="centermask2",
        url="https://github.com/youngwanLEE/centermask2",
        config_file="configs/centermask/centermask_R_50_FPN_ms_3x.yaml",
        get_cfg="centermask.config:get_cfg",
        small=("MODEL.FCOS.POST_NMS_TOPK_TRAIN", 20, "MODEL.FCOS.POST_NMS_TOPK_TEST", 20),
    ),
    Project(
        "Mask2Former",
        tree="Mask2Former",
        url="https://github.com/facebookresearch/Mask2Former",
        config_file="configs/coco/instance-segmentation/maskformer2_R50_bs16_50ep.yaml",
        add=(
            "detectron2.projects.deeplab:add_deeplab_config",
            "mask2former:add_maskformer2_config",
        ),
        small=(
            *("INPUT.IMAGE_SIZE", 128, "MODEL.MASK_FORMER.NUM_OBJECT_QUERIES", 10),
            *("MODEL.MASK_FORMER.TRAIN_NUM_POINTS", 1000),
        ),
        stubs=("MultiScaleDeformableAttention",),
    ),
    Project(
        "MaskFormer",
        tree="MaskFormer",
        url="https://github.com/facebookresearch/MaskFormer",
        config_file="configs/ade20k-150/maskformer_R50_bs16_160k.yaml",
        add=(
            "detectron2.projects.deeplab:add_deeplab_config",
            "mask_former:add_mask_former_config",
        ),
        small=(
            *("INPUT.CROP.SIZE", (96, 96), "MODEL.MASK_FORMER.NUM_OBJECT_QUERIES", 10),
            *("MODEL.SEM_SEG_HEAD.NUM_CLASSES", 5, "MODEL.RESNETS.NORM", "BN"),
        ),
        data="sem_seg",
    ),
    Project(
        "OneFormer",
        tree="OneFormer",
        url="https://github.com/SHI-Labs/OneFormer",
        config_file="configs/coco/oneformer_R50_bs16_50ep.yaml",
        add=(
            "detectron2.projects.deeplab:add_deeplab_config",
            *("oneformer:add_common_config", "oneformer:add_swin_config"),
            "oneformer:add_oneformer_config",
        ),
        small=(
            *("INPUT.IMAGE_SIZE", 128, "MODEL.ONE_FORMER.NUM_OBJECT_QUERIES", 40),
            *("MODEL.TEXT_ENCODER.NUM_LAYERS", 2, "MODEL.ONE_FORMER.DEC_LAYERS", 4),
            *("MODEL.ONE_FORMER.TRAIN_NUM_POINTS", 1000),
        ),
        # Its last evaluation is of datasets that other keys name.
        opts=(
            *("DATASETS.TEST_PANOPTIC", (), "DATASETS.TEST_INSTANCE", ()),
            *("DATASETS.TEST_SEMANTIC", ()),
        ),
        data="panoptic",
        stubs=("MultiScaleDeformableAttention", "natten", "wandb"),
    ),
    Project(
        "MaskDINO",
        tree="MaskDINO",
        url="https://github.com/IDEA-Research/MaskDINO",
        config_file="configs/coco/instance-segmentation/maskdino_R50_bs16_50ep_3s.yaml",
        add=("detectron2.projects.deeplab:add_deeplab_config", "maskdino:add_maskdino_config"),
        small=(
            *("INPUT.IMAGE_SIZE", 128, "MODEL.MaskDINO.NUM_OBJECT_QUERIES", 20),
            *("MODEL.MaskDINO.DN_NUM", 100, "MODEL.MaskDINO.DEC_LAYERS", 3),
            *("MODEL.MaskDINO.TRAIN_NUM_POINTS", 1000),
        ),
        stubs=("MultiScaleDeformableAttention",),
    ),
    Project(
        "DiffusionDet",
        tree="DiffusionDet",
        url="https://github.com/ShoufaChen/DiffusionDet",
        config_file="configs/diffdet.coco.res50.yaml",
        add=(
            "diffusiondet:add_diffusiondet_config",
            "diffusiondet.util.model_ema:add_model_ema_configs",
        ),
        small=("INPUT.CROP.SIZE", (64, 96), "MODEL.DiffusionDet.NUM_PROPOSALS", 20),
    ),
    Project(
        "SparseInst",
        tree="SparseInst",
        url="https://github.com/hustvl/SparseInst",
        config_file="configs/sparse_inst_r50_giam.yaml",
        paths=("tools", "."),
        add=("sparseinst:add_sparse_inst_config",),
    ),
    Project(
        "YOLOF",
        tree="YOLOF",
        url="https://github.com/chensnathan/YOLOF",
        config_file="configs/yolof_R_50_C5_1x.yaml",
        paths=("tools", "."),
        get_cfg="yolof.config:get_cfg",
    ),
    Project(
        "detrex DINO",
        tree="detrex",
        url="https://github.com/IDEA-Research/detrex",
        config_file="projects/dino/configs/dino-resnet/dino_r50_4scale_12ep.py",
        kind="lazy",
        opts=("model.device=cpu",),
        small=(
            *("model.num_queries=20", "model.dn_number=4"),
            "dataloader.train.mapper.augmentation.1.short_edge_length=[128]",
            "dataloader.train.mapper.augmentation.1.max_size=160",
            "dataloader.train.mapper.augmentation_with_crop=null",
            "dataloader.test.mapper.augmentation.0.short_edge_length=128",
            "dataloader.test.mapper.augmentation.0.max_size=160",
        ),
        stubs=("detrex._C", "fairscale", "wandb"),
        # Its setup.py links the folder into the package.
        patches=(("detrex.config:get_config", lambda path: LazyConfig.load(f"configs/{path}")),),
        names_cuda=True,
        needs_main=True,
    ),
    Project(
        "few-shot-object-detection",
        tree="few-shot-object-detection",
        url="https://github.com/ucbdrive/few-shot-object-detection",
        config_file="configs/PascalVOC-detection/split1/faster_rcnn_R_101_FPN_base1.yaml",
        paths=("tools", "."),
        get_cfg="fsdet.config:get_cfg",
        small=(*_FEW_ROIS, "MODEL.RESNETS.DEPTH", 50),
        # Python has them in collections.abc alone since 3.10.
        patches=(("collections:Mapping", Mapping), ("collections:MutableMapping", MutableMapping)),
    ),
    Project(
        "Unbiased Teacher",
        tree="unbiased-teacher",
        url="https://github.com/facebookresearch/unbiased-teacher",
        config_file="configs/coco_supervision/faster_rcnn_R_50_FPN_sup1_run1.yaml",
        trainer="train_net:UBTeacherTrainer",
        add=("ubteacher:add_ubteacher_config",),
        small=_FEW_ROIS,
        opts=(
            *("DATASETS.CROSS_DATASET", True, "DATASETS.TRAIN_LABEL", (DATASET,)),
            *("DATASETS.TRAIN_UNLABEL", (DATASET,), "SEMISUPNET.BURN_UP_STEP", 1),
            *("SEMISUPNET.BBOX_THRESHOLD", 0.0, "MODEL.ROI_HEADS.LOSS", "CrossEntropy"),
            *("SOLVER.IMG_PER_BATCH_LABEL", 2, "SOLVER.IMG_PER_BATCH_UNLABEL", 2),
        ),
        # The base class of its focal loss, which Detectron2 has removed.
        patches=(("detectron2.modeling.roi_heads.fast_rcnn:FastRCNNOutputs", object),),
        has_plain_step=False,
        memfit_trainer="compatibility_checks.semi_supervised:make_trainer",
    ),
    Project(
        "Detic",
        tree="Detic",
        url="https://github.com/facebookresearch/Detic",
        config_file="configs/BoxSup-C2_LCOCO_CLIP_R18_640b32_4x.yaml",
        trainer="detic",
        kind="loop",
        paths=(".", "../CenterNet2"),  # its third_party
        add=("centernet.config:add_centernet_config", "detic.config:add_detic_config"),
        opts=(
            "MODEL.TIMM.PRETRAINED",
            False,
            "FP16",
            False,
            "MODEL.ROI_BOX_HEAD.USE_FED_LOSS",
            False,
        ),
        small=(
            *("INPUT.TRAIN_SIZE", 128, "INPUT.TEST_SIZE", 128),
            *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16),
            *("MODEL.CENTERNET.PRE_NMS_TOPK_TRAIN", 200, "TEST.DETECTIONS_PER_IMAGE", 10),
            *("MODEL.CENTERNET.POST_NMS_TOPK_TRAIN", 40, "MODEL.CENTERNET.POST_NMS_TOPK_TEST", 20),
        ),
        stubs=("clip", "models"),  # its text encoder; Deformable DETR
    ),
    Project(
        "CenterNet2",
        tree="CenterNet2",
        url="https://github.com/xingyizhou/CenterNet2",
        config_file="configs/CenterNet2_R50_1x.yaml",
        trainer="centernet2",
        kind="loop",
        add=("centernet.config:add_centernet_config",),
        small=(
            *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16, "TEST.DETECTIONS_PER_IMAGE", 10),
            *("MODEL.CENTERNET.PRE_NMS_TOPK_TRAIN", 200, "MODEL.CENTERNET.PRE_NMS_TOPK_TEST", 100),
            *("MODEL.CENTERNET.POST_NMS_TOPK_TRAIN", 40, "MODEL.CENTERNET.POST_NMS_TOPK_TEST", 20),
        ),
    ),
    Project(
        "d2go",
        tree="d2go",
        url="https://github.com/facebookresearch/d2go",
        config_file="configs/mask_rcnn_fbnetv3a_C4.yaml",
        trainer="d2go",
        kind="loop",
        get_cfg="compatibility_checks.loops:d2go_cfg",
        small=_FEW_ROIS,
        stubs=(
            *("torch.ao.quantization.quantize_pt2e", "torch.ao.quantization.quantizer"),
            *("caffe2", "numa", "pytorch_lightning"),
        ),
        needs_main=True,
    ),
)


def made(name: str, folder: Path, scratch: Path, ranks: int) -> tuple[Job, Optional[type]]:
    """Make the small job of a project of the table, and its trainer's class, in any process.

    Args:
        folder: folder of all trees.
        scratch: folder for the dataset.
    """
    project = next(p for p in PROJECTS if p.name == name)
    project.prepare(folder / project.tree)
    register_dataset(DATASET, project.data, scratch / f"dataset_{os.getpid()}")
    return project.job(folder / project.tree, ranks), project.trainer_class()
