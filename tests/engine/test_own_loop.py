# Copyright (c) the d2_memfit developers.
"""A training loop of the user's own."""

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer, PeriodicCheckpointer
from detectron2.utils.events import EventStorage
from injection import seed_all
from tiny import images, parameters, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.compat import create_ddp_model
from d2_memfit.config.settings import RecoveryOptions

STEPS = 2


LR, GAMMA, PERIOD = 0.01, 0.5, 2


def train(folder, max_iter, resume=False, precision="fp32"):
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


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_loop_goes_on_as_if_nothing_had_happened(tmp_path, precision):
    expected, _ = train(tmp_path / "straight", 6, precision=precision)
    train(tmp_path / "resumed", 4, precision=precision)
    actual, storage = train(tmp_path / "resumed", 6, resume=True, precision=precision)
    states = [trainer.state_dict() for trainer in (actual, expected)]
    assert states[0].pop("counts") == states[1].pop("counts")
    torch.testing.assert_close(*states, rtol=0, atol=0)
    torch.testing.assert_close(parameters(actual.model), parameters(expected.model), rtol=0, atol=0)
    assert [i for _, i in storage.history("total_loss").values()] == [4, 5]


def stepped(rank, accumulates):
    """Weights after two windows of a loop that steps by itself, or of ``run_step``."""
    model = tiny_model(tiny_cfg("proposal_network", fpn=False))
    model = create_ddp_model(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    batches = [images(3, first=6 * i + 3 * rank) for i in range(2)]
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
    if accumulates and rank == 0:
        assert losses == {name: storage.latest()[name][0] for name in losses}
        assert sum(losses.values()) == storage.latest()["total_loss"][0]
    return parameters(model)


def test_a_loop_that_steps_by_itself_trains_the_same():
    torch.testing.assert_close(stepped(0, True), stepped(0, False), rtol=0, atol=0)
