# Copyright (c) the d2_memfit developers.
"""A training loop, losses and optimizers of the user's own."""

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer, PeriodicCheckpointer
from detectron2.utils.events import EventStorage
from injection import iterate, seed_all
from tiny import images, parameters, relative_difference, tiny_cfg, tiny_model
from torch import nn
from torch.nn.functional import softplus

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.compat import create_ddp_model
from d2_memfit.config.settings import RecoveryOptions

STEPS = 2
LR, GAMMA, PERIOD = 0.01, 0.5, 2


def train(folder, max_iter, resume=False, precision="float32"):
    """CenterNet2's do_train: a trainer takes the place of its lines from model to optimizer."""
    model = tiny_model(tiny_cfg("proposal_network", fpn=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, PERIOD, GAMMA)

    def batches():  # each iteration has images of its own, also after a resume
        for i in range(STEPS * start_iter, STEPS * max_iter):
            yield images(1, first=i)

    trainer = AccumulatingTrainer(
        model, batches(), optimizer, STEPS, precision, recovery=RecoveryOptions()
    )
    folder.mkdir(exist_ok=True)
    checkpointer = DetectionCheckpointer(model, str(folder), trainer=trainer, scheduler=scheduler)
    start_iter = checkpointer.resume_or_load("", resume=resume).get("iteration", -1) + 1
    periodic_checkpointer = PeriodicCheckpointer(checkpointer, PERIOD, max_iter=max_iter)
    with EventStorage(start_iter) as storage:
        for iteration in range(start_iter, max_iter):
            torch.manual_seed(iteration)  # the sampling of anchors
            trainer.run_step()
            assert trainer.iter == storage.iter == iteration
            storage.put_scalar("lr", optimizer.param_groups[0]["lr"], smoothing_hint=False)
            scheduler.step()
            periodic_checkpointer.step(iteration)
            storage.step()
    return trainer, storage


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_resumed_loop_goes_on_as_if_nothing_had_happened(tmp_path, precision):
    expected, _ = train(tmp_path / "straight", 6, precision=precision)
    train(tmp_path / "resumed", 4, precision=precision)
    actual, storage = train(tmp_path / "resumed", 6, resume=True, precision=precision)
    states = [trainer.state_dict() for trainer in (actual, expected)]
    assert states[0].pop("counts") == states[1].pop("counts")
    torch.testing.assert_close(*states, rtol=0, atol=0)
    torch.testing.assert_close(parameters(actual.model), parameters(expected.model), rtol=0, atol=0)
    assert [i for _, i in storage.history("total_loss").values()] == [4, 5]


class WithCritic(nn.Module):
    """Scores of a detector, and of a critic that tells its features from those of other images."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(3 * 8 * 8, 8)
        self.detector, self.critic = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, batch, trains_features=True):
        pixels = torch.stack([image["image"] for image in batch]).flatten(1)
        with torch.set_grad_enabled(trains_features):
            features = self.backbone(pixels.to(self.critic.weight.dtype) / 255).tanh()
        return self.detector(features), self.critic(features)


def detector_losses(model, batch):
    labelled, others = batch
    loss_fool = softplus(-model(others)[1]).mean()
    return {"loss_cls": model(labelled)[0].square().mean(), "loss_fool": loss_fool}


def critic_losses(model, batch):
    labelled, others = (model(images, trains_features=False)[1] for images in batch)
    return {"loss_critic": softplus(-labelled).mean() + softplus(others).mean()}


@pytest.mark.parametrize("size", [1, 3])
def test_two_optimizers_have_the_gradients_of_the_full_batch(size):
    """The loop of docs/YOUR_PROJECT.md."""

    def gradients(size):
        model, seen = WithCritic().double(), []
        halves = []
        for parts, losses in (
            ((model.backbone, model.detector), detector_losses),
            ((model.critic,), critic_losses),
        ):
            optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=1e-4)
            options = {"micro_batch_size": size, "loss_fn": losses}
            halves.append((AccumulatingTrainer(model, (), optimizer, **options), optimizer))
        with EventStorage() as storage:
            for first in (0, 4):
                for trainer, optimizer in halves:
                    trainer.accumulate((images(4, first, size=8), images(4, first + 100, size=8)))
                    optimizer.step()
                    of_half = optimizer.param_groups[0]["params"]
                    seen.append({i: p.grad.clone() for i, p in enumerate(of_half)})
                storage.step()
        return seen

    for cut, full in zip(gradients(size), gradients(None)):
        assert relative_difference(cut, full) < 1e-12


def stepped(accumulates):
    """Weights after two windows of a loop that steps by itself, or of ``run_step``."""
    model = tiny_model(tiny_cfg("proposal_network", fpn=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    batches = [images(3, first=6 * i) for i in range(2)]
    options = {"micro_batch_size": 2, "recovery": RecoveryOptions()}
    trainer = AccumulatingTrainer(model, batches, optimizer, **options)
    seed_all()
    with EventStorage() as storage:
        for batch in batches:
            if accumulates:
                losses = trainer.accumulate(batch)
                optimizer.step()
            else:
                trainer.run_step()
            storage.step()
    if accumulates:
        assert losses == {name: storage.latest()[name][0] for name in losses}
        assert sum(losses.values()) == storage.latest()["total_loss"][0]
    return parameters(model)


def test_a_loop_that_steps_by_itself_trains_the_same():
    torch.testing.assert_close(stepped(True), stepped(False), rtol=0, atol=0)


def halves(model, batch):
    """Two forwards behind one backward, as semi-supervised training has them."""
    half = len(batch) // 2
    scores = [model(part) for part in (batch[:half], batch[half:])]
    return {"loss": sum(s.square().mean() for pair in scores for s in pair) / 2}


def wrapped_on_rank(rank, steps):
    model = create_ddp_model(WithCritic(), broadcast_buffers=False)

    def losses(model, batch):
        assert type(model).__name__ == "DistributedDataParallel"
        return halves(model, batch)

    own = images(4, first=4 * rank, size=8)
    loader = [own] if steps == 1 else [own[:2], own[2:]]
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    iterate(AccumulatingTrainer(model, loader, sgd, steps, loss_fn=losses))
    return parameters(model.module)


@pytest.mark.parametrize("steps", [1, 2])
def test_on_several_ranks_a_function_for_the_losses_gets_the_wrapped_model(two_ranks, steps):
    results = two_ranks.run(wrapped_on_rank, steps)
    model = WithCritic()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    iterate(AccumulatingTrainer(model, [images(8, size=8)], sgd, loss_fn=halves))
    assert relative_difference(results[0], parameters(model)) < 1e-6
    assert relative_difference(results[1], results[0]) == 0
