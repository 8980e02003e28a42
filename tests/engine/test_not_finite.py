# Copyright (c) the d2_memfit developers.
"""What an error says of a loss that is not finite."""

import pytest
import torch
import torch.nn.functional as F
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils.events import EventStorage

from d2_memfit import AccumulatingTrainer


class Model(torch.nn.Module):
    """Its loss is a product that float32 can hold only for small factors."""

    def __init__(self, weight=1.0, norm=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1, 4), weight))
        self.norm = norm

    def forward(self, batch):
        x = torch.stack([d["image"].float().mean().expand(4) for d in batch])
        return {"loss_cls": F.linear(x, self.weight).mean(), "loss_box": self.weight[0, 0] * 0}


def image():
    return {"image": torch.full((3, 8, 8), 1e3), "file_name": "a.jpg", "image_id": 7}


@pytest.mark.parametrize(
    ("model", "of_batch", "cause"),
    [
        (Model(3e38, FrozenBatchNorm2d(3)), image(), "does not normalise the activations of ran"),
        (Model(float("inf")), image(), "The weights are not finite"),
        (Model(3e38), image(), "The weights are finite"),
    ],
)
def test_its_images_and_what_can_be_seen_are_named(model, of_batch, cause):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = AccumulatingTrainer(model, [[of_batch]], optimizer)
    with EventStorage(5), pytest.raises(FloatingPointError) as e:
        trainer.run_step()
    assert "iteration=5! rank 0: loss_cls" in str(e.value)
    assert "a.jpg (image_id 7)" in str(e.value)
    assert cause in str(e.value)
