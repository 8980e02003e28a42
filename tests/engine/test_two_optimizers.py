# Copyright (c) the d2_memfit developers.
"""Two optimizers in one loop, as for a detector and its critic."""

import pytest
import torch
from detectron2.utils.events import EventStorage
from injection import InjectedTrainer
from tiny import every_anchor_counts, images, relative_difference, tiny_cfg, tiny_model
from torch import nn
from torch.nn.functional import softplus

from d2_memfit.common.compat import without_ddp


class WithCritic(nn.Module):
    """The critic tells features of labelled images from those of another domain."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        cfg = every_anchor_counts(tiny_cfg("proposal_network", fpn=False))
        self.detector = tiny_model(cfg, dtype=dtype)
        self.detector.proposal_generator.predict_proposals = lambda *args: None  # none in float64
        layers = nn.Conv2d(16, 512, 3, 4, 1), nn.ReLU(), nn.Conv2d(512, 1, 3)
        self.critic = nn.Sequential(*layers).to(dtype)

    def forward(self, images, detects=True, trains_features=True):
        if detects:
            return self.detector(images)
        with torch.set_grad_enabled(trains_features):
            features = self.features(images)
        return self.critic(features)

    def features(self, images):
        pixels = torch.stack([i["image"] for i in images]).to(self.critic[0].weight.dtype)
        return self.detector.backbone(pixels / 255)["res2"]


def detector_losses(model, batch):
    labelled, unlabelled = batch
    scores = model(unlabelled, detects=False)
    return {**model(labelled), "loss_fool": softplus(-scores).mean()}


def critic_losses(model, batch):
    real, other = (model(b, detects=False, trains_features=False) for b in batch)
    return {"loss_critic": softplus(-real).mean() + softplus(other).mean()}


def columns(num=4, first=0, **kwargs):
    return images(num, first, **kwargs), images(num, first + 100, **kwargs)


def optimizers_of(model):
    groups = model.detector.parameters(), model.critic.parameters()
    return [torch.optim.Adam(group, lr=1e-4) for group in groups]


def halves_of(model, sizes=(None, None), **options):
    """The trainer and the optimizer of each half of an iteration."""
    optimizers = optimizers_of(without_ddp(model))
    return [
        (
            InjectedTrainer(model, (), optimizer, micro_batch_size=size, loss_fn=f, **options),
            optimizer,
        )
        for optimizer, size, f in zip(optimizers, sizes, (detector_losses, critic_losses))
    ]


def train(halves, batches, see=lambda optimizer: None):
    """The loop of docs/YOUR_PROJECT.md."""
    with EventStorage() as storage:
        for batch in batches:
            for trainer, optimizer in halves:
                trainer.accumulate(batch)
                optimizer.step()
                see(optimizer)
            storage.step()


def gradients_of(optimizer):
    return {i: p.grad.clone() for i, p in enumerate(optimizer.param_groups[0]["params"])}


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_have_the_gradients_of_the_full_batch(size):

    def gradients(*sizes):
        seen = []
        halves = halves_of(WithCritic(torch.float64), sizes)
        train(halves, [columns(), columns(first=4)], lambda o: seen.append(gradients_of(o)))
        return seen

    distances = [
        relative_difference(*pair) for pair in zip(gradients(size, size), gradients(None, None))
    ]
    print(f"{max(distances):.0e} from the gradients of the full batch")
    assert max(distances) < 1e-12
