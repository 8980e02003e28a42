# Copyright (c) the d2_memfit developers.
"""Deformable convolution, which Detectron2 has on a GPU only, in dry runs."""

import pytest
import torch
from tiny import sized
from torchvision.ops import deform_conv2d

from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.stand_ins import compiled_operators, cuda_as_cpu, deform_conv
from d2_memfit.planner.steps import Session
from d2_memfit.planner.timeline import Workspace

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
GROUPED = ["MODEL.RESNETS.DEFORM_NUM_GROUPS", 2]


@pytest.mark.parametrize("modulated", [False, True])
def test_gradients_have_the_sizes_that_torchvisions_operator_gives(modulated):
    x = torch.randn(2, 8, 12, 10, requires_grad=True)
    weight = torch.randn(6, 4, 3, 3, requires_grad=True)
    offset = torch.randn(2, 2 * 2 * 9, 12, 10, requires_grad=True)
    mask = torch.rand(2, 2 * 9, 12, 10, requires_grad=True) if modulated else None
    tensors = [t for t in (x, offset, weight, mask) if t is not None]
    expected = deform_conv2d(x, offset, weight, None, 1, 1, 1, mask)
    wanted = torch.autograd.grad(expected.sum(), tensors)
    with cuda_as_cpu(*compiled_operators()):
        if modulated:
            y = deform_conv.modulated_deform_conv(x, offset, mask, weight, None, 1, 1, 1, 2, 2)
        else:
            y = deform_conv.deform_conv(x, offset, weight, 1, 1, 1, 2, 2)
        found = torch.autograd.grad(y.sum(), tensors)
    torch.testing.assert_close(y, expected)  # real tensors are computed
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("opts", [[], GROUPED, ["MODEL.RESNETS.DEFORM_MODULATED", True]])
def test_a_deformable_backbone_has_detectron2s_buffers(opts):
    on = ["MODEL.RESNETS.DEFORM_ON_PER_STAGE", [False, False, False, True]]
    cfg = load_cfg(MASK, ["MODEL.DEVICE", "cpu", *on, *opts])
    job = Job.from_cfg(cfg, 1, **sized(cfg, (160, 224), 5))
    run = Session(job).train(job.training_batch(1))
    columns = 512 * 9 * (160 // 32) * (224 // 32) * 4  # of the second convolution of res5's blocks
    copy = 0 if "MODEL.RESNETS.DEFORM_MODULATED" in opts else 512 * (160 // 32) * (224 // 32) * 4
    sizes = [event.num_bytes for event in run.events if isinstance(event, Workspace)]
    assert sizes.count(columns + copy) == 2 * 3  # in forward and backward of three
