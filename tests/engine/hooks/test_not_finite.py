# Copyright (c) the d2_memfit developers.
"""The likely cause of a loss that is not finite, found by trying it out."""

import pytest
import torch
import torch.nn.functional as F
from detectron2.structures import Boxes, Instances, RotatedBoxes
from detectron2.utils.events import EventStorage

from d2_memfit import AccumulatingTrainer


class Model(torch.nn.Module):
    """Its loss is a product that float32 can hold, and float16 cannot."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1, 4), weight))

    def forward(self, batch):
        x = torch.stack([d["image"].float().mean().expand(4) for d in batch])
        return {"loss_cls": F.linear(x, self.weight).mean(), "loss_box": self.weight[0, 0] * 0}


def image(value=1.0, box=(1.0, 1.0, 5.0, 5.0)):
    kind = Boxes if len(box) == 4 else RotatedBoxes
    instances = Instances((8, 8), gt_boxes=kind(torch.tensor([box])))
    pixels = torch.full((3, 8, 8), value)
    return {"image": pixels, "file_name": "a.jpg", "image_id": 7, "instances": instances}


def trainer_of(model, batches, precision, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return AccumulatingTrainer(model, iter(batches), optimizer, precision=precision)


@pytest.fixture(params=[0, 5], ids=["fresh", "resumed"])
def message(request):
    """The error's text after some batches of a run, which begins with this iteration."""
    start = request.param

    def message(model, batches, precision="fp32", lr=0.0):
        trainer = trainer_of(model, batches, precision, lr)
        if start:
            trainer.load_state_dict(trainer_of(Model(), [], precision, lr).state_dict())
        with EventStorage(start) as storage:
            for _ in batches[1:]:
                trainer.run_step()
                storage.step()
            with pytest.raises(FloatingPointError) as e:
                trainer.run_step()
        assert f"iteration={start + len(batches) - 1}! rank 0: loss_cls" in str(e.value)
        assert ("loss_box" in str(e.value)) is not bool(model.weight.isfinite().all())
        assert "a.jpg (image_id 7)" in str(e.value)
        return str(e.value)

    return message


def test_pixels_that_are_not_finite(message):
    text = message(Model(), [[image(float("nan"))]])
    assert "Likely the data, because a.jpg has values in image that are not finite" in text


@pytest.mark.parametrize("box", [(5.0, 1.0, 5.0, 5.0), (5.0, 5.0, 0.0, 2.0, 30.0)])
def test_a_box_without_width(message, box):
    text = message(Model(3e38), [[image(1e3, box=box)]])
    assert "Likely the data, because a.jpg has a box without width or height" in text


def test_weights_that_are_not_finite(message):
    text = message(Model(float("inf")), [[image()]])
    assert "Likely the learning rate, because the weights" in text


def test_losses_that_grew(message):
    batches = [[image(10.0**i)] for i in (0, 0, 2, 38)]
    text = message(Model(10.0), batches)
    assert "Likely the learning rate, because the losses have grown" in text


def test_mixed_precision(message):
    text = message(Model(1e3), [[image(1e3)]], precision="fp16")
    assert "Likely mixed precision, because the losses are finite in float32" in text


@pytest.mark.parametrize("options", [{}, {"box": (5.0, 5.0, 2.0, 2.0, 30.0)}])
def test_nothing_of_these(message, options):
    text = message(Model(1e3), [[image()], [image(1e38, **options)]])
    assert "Likely the data, because weights and earlier" in text


def test_the_first_iteration(message):
    """After a resume, the losses may have grown before."""
    text = message(Model(1e3), [[image(1e38)]])
    is_fresh = "iteration=0" in text
    assert "Likely the data" in text
    assert ("Likely the data or the learning rate, because the weights" in text) != is_fresh


def test_a_search_that_fails_does_not_hide_the_loss(message):
    class Full(Model):
        """There is no memory for one more forward, in float32."""

        def forward(self, batch):
            if not torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(batch)

    text = message(Full(1e3), [[image(1e3)]], precision="fp16")
    assert "Cause not known: the search for it failed, OutOfMemoryError: CUDA out of" in text
