# Copyright (c) the d2_memfit developers.
"""Models that read values of masks, whose memory depends on where the objects are."""

from contextlib import nullcontext

import pytest
import torch
from detectron2.structures import BitMasks, Instances
from torch import nn

from d2_memfit.memory import TensorMeter
from d2_memfit.planner.dry_run import DryRun
from d2_memfit.planner.meta import is_fake, make_fake
from d2_memfit.planner.values import WithoutValues

SIZE = (640, 800)


class Cells(nn.Module):
    """SOLOv2: a kernel and a target mask for each cell of a grid that a mask's center is in."""

    def __init__(self, num_cells=8):
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 4, 4)
        self.num_cells = num_cells

    def forward(self, batch):
        features = torch.stack([self.backbone(d["image"].float()) for d in batch])
        predictions, targets = [], []
        for feature, d in zip(features, batch):
            masks = d["instances"].gt_masks.tensor
            for mask, is_there in zip(masks, masks.sum(dim=(1, 2)) > 0):
                if not is_there:
                    continue
                y, x = (mask.nonzero().float().mean(dim=0) / torch.tensor(SIZE)).tolist()
                reach = 1 + (0.3 < x < 0.7) + (0.3 < y < 0.7)
                predictions += [feature] * reach
                small = torch.from_numpy(mask[::4, ::4].to(torch.uint8).numpy())
                targets += [small] * reach
        predictions, targets = torch.stack(predictions), torch.stack(targets).float()
        return {"loss": (predictions.sigmoid() - targets[:, None]).pow(2).mean()}


def make_batch():
    masks = torch.zeros(6, *SIZE, dtype=torch.bool)
    for i in range(5):  # the last is empty
        masks[i, 90 * i : 90 * i + 100, 120 * i : 120 * i + 150] = True
    instances = Instances(SIZE, gt_masks=BitMasks(masks))
    return [{"image": torch.zeros(3, *SIZE, dtype=torch.uint8), "instances": instances}] * 2


def peak(build=WithoutValues):
    with build():
        model = Cells()
    batch = make_batch()
    tensors = [batch[0]["image"], batch[0]["instances"].gt_masks.tensor]
    make_fake(batch[0]["image"])
    with DryRun(model) as run:
        run.own("inputs", tensors)
        losses = model(batch)
        losses["loss"].backward()
    return run.peak_bytes


def test_masks_keep_their_values_in_a_dry_run(monkeypatch):
    found = peak()
    monkeypatch.setattr(DryRun, "_call", TensorMeter._call)
    assert found == pytest.approx(peak(build=nullcontext), rel=0.001)


@pytest.mark.parametrize(("num", "is_computed"), [(2, True), (40, False)])
def test_targets_of_a_loss_are_not_computed_if_they_are_many(num, is_computed):
    masks = torch.ones(num, *SIZE, dtype=torch.bool)
    weight = make_fake(torch.ones(1, *SIZE))
    with WithoutValues():
        targets = masks.float()
        assert is_fake(targets) != is_computed
        assert is_fake(weight * targets)
    assert targets.shape == masks.shape
    if is_computed:
        assert targets.all()
