# Copyright (c) the d2_memfit developers.
"""What tests share: small models and images, the files of a run, processes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from detectron2.modeling import BACKBONE_REGISTRY, build_model
from detectron2.modeling.backbone.fpn import build_resnet_fpn_backbone
from detectron2.modeling.backbone.resnet import ResNet
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints

from d2_memfit import Job
from d2_memfit.config.load import load_cfg
from d2_memfit.techniques.registry import get_technique

ROOT = Path(__file__).resolve().parents[1]


@BACKBONE_REGISTRY.register()
def build_short_resnet_fpn_backbone(cfg, input_shape):
    """With one block in each of the four stages."""
    make_stage = ResNet.make_stage

    def make_short(stride_per_block, **kwargs):
        return make_stage(**{**kwargs, "num_blocks": 1}, stride_per_block=stride_per_block[:1])

    with patch.object(ResNet, "make_stage", make_short):
        return build_resnet_fpn_backbone(cfg, input_shape)


def tiny_cfg(family="mask_rcnn", image_size=64, device="cpu", fpn=True):
    """Config of a detector with FPN and a ResNet of four blocks, with a tenth of the channels.

    RetinaNet has all blocks of a ResNet-50.

    Args:
        family: "proposal_network", "faster_rcnn", "mask_rcnn", "keypoint_rcnn" or "retinanet".
        image_size: length of the shorter side, in pixels.
        device: MODEL.DEVICE.
        fpn: False leaves a ResNet-50's first blocks alone, for what is not about models, and for
            processes that do not know this file's backbone.
    """
    cfg = load_cfg("Base-RCNN-FPN")
    cfg.MODEL.DEVICE = str(device)
    cfg.MODEL.META_ARCHITECTURE = {
        "proposal_network": "ProposalNetwork",
        "retinanet": "RetinaNet",
    }.get(family, "GeneralizedRCNN")
    cfg.MODEL.MASK_ON = family == "mask_rcnn"
    cfg.MODEL.KEYPOINT_ON = family == "keypoint_rcnn"
    cfg.MODEL.PIXEL_STD = [300.0, 300.0, 300.0]  # keeps the activations of random weights small
    cfg.MODEL.BACKBONE.NAME = "build_short_resnet_fpn_backbone"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = 8
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 4
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 16
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[8], [16], [32], [64], [128]]
    cfg.MODEL.RPN.BATCH_SIZE_PER_IMAGE = 32
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = 100
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN = 50
    cfg.MODEL.RPN.PRE_NMS_TOPK_TEST = 50
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = 20
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 1
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 16
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 32
    cfg.MODEL.ROI_MASK_HEAD.CONV_DIM = 16
    cfg.MODEL.ROI_MASK_HEAD.NUM_CONV = 1
    cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS = [16]
    cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = 2
    if family == "retinanet":
        cfg.MODEL.BACKBONE.NAME = "build_retinanet_resnet_fpn_backbone"
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
        cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4", "res5"]
        cfg.MODEL.RETINANET.NUM_CLASSES = 1
        cfg.MODEL.RETINANET.NUM_CONVS = 1
    if not fpn:
        cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
        for part in (cfg.MODEL.RPN, cfg.MODEL.ROI_HEADS, cfg.MODEL.RETINANET):
            part.IN_FEATURES = ["res2"]
        cfg.MODEL.RESNETS.OUT_FEATURES = ["res2"]
        cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[16]]
    cfg.INPUT.MIN_SIZE_TRAIN = (image_size,)
    cfg.INPUT.MIN_SIZE_TEST = image_size
    cfg.INPUT.MAX_SIZE_TRAIN = cfg.INPUT.MAX_SIZE_TEST = 2 * image_size
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.BASE_LR = 0.01
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.SOLVER.STEPS = ()
    cfg.SEED = 1
    return cfg


def sized(cfg, image_size, num_instances):
    """Make the images of a config as large as their files; return a job's arguments for those."""
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = (0,), 0
    return {"image_size": image_size, "num_instances": num_instances}


def suggested(name, cfg):
    """The keys and values with which a plan turns a technique on, for images with bit masks."""
    job = Job.from_cfg(cfg, 1, batch=images(2))
    return get_technique(name).settings(job, build_model(cfg))


def every_anchor_counts(cfg):
    """Make the proposal network's loss use all anchors, so that it is a mean over images."""
    cfg.MODEL.RPN.BATCH_SIZE_PER_IMAGE = 4096  # more than exist: none is dropped at random
    cfg.MODEL.RPN.LOSS_WEIGHT = 10.0  # the loss is divided by that number
    return cfg


def tiny_model(cfg, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return build_model(cfg).to(dtype)


def image(index, size=64, num_instances=3):
    """Make a dataset dict with pixels, boxes, masks and keypoints, random by ``index``.

    The keypoints are two corners of each box.
    """
    rng = torch.Generator().manual_seed(index)
    corner = torch.rand(num_instances, 2, generator=rng) * size * 0.6
    extent = (torch.rand(num_instances, 2, generator=rng) * 0.3 + 0.1) * size
    instances = Instances((size, size))
    instances.gt_boxes = Boxes(torch.cat([corner, corner + extent], dim=1))
    instances.gt_classes = torch.zeros(num_instances, dtype=torch.int64)
    masks = torch.zeros(num_instances, size, size, dtype=torch.bool)
    for mask, (x0, y0, x1, y1) in zip(masks, instances.gt_boxes.tensor.long().tolist()):
        mask[y0:y1, x0:x1] = True
    instances.gt_masks = BitMasks(masks)
    visible = torch.full((num_instances, 2, 1), 2.0)
    corners = instances.gt_boxes.tensor.reshape(num_instances, 2, 2)
    instances.gt_keypoints = Keypoints(torch.cat([corners, visible], dim=2))
    return {
        "image": torch.randint(0, 256, (3, size, size), dtype=torch.uint8, generator=rng),
        "instances": instances,
        "height": size,
        "width": size,
        "file_name": f"image_{index}.png",
        "image_id": index,
    }


def images(num, first=0, **kwargs):
    return [image(first + i, **kwargs) for i in range(num)]


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def read_metrics(output_dir):
    """metrics.json as a list of dicts."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.json").open()]


def run_process(command, timeout_s=180, **kwargs):
    """Run a command to its end in a process that can import what this one can."""
    return subprocess.run(
        [str(c) for c in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        **{"env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, **kwargs},
    )


def owners_at_peak(timeline):
    """Bytes by owner at the peak of a dry run."""
    owners = Counter()
    for allocation in timeline.alive_at_peak():
        owners[allocation.owner] += allocation.num_bytes
    return owners


def peak_of(timeline):
    return sum(owners_at_peak(timeline).values())


def relative_difference(actual, expected):
    """Norm of the difference of tensors with the same names over the norm of ``expected``."""
    actual_values = torch.cat([actual[name].double().flatten() for name in expected])
    expected_values = torch.cat([value.double().flatten() for value in expected.values()])
    return ((actual_values - expected_values).norm() / expected_values.norm()).item()
