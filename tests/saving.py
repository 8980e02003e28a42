# Copyright (c) the d2_memfit developers.
"""A run that saves all the time, and whose weights say which iteration they are of.

    python saving.py {kill,full} NUM_RUNS SEED OUTPUT_DIR

Each run resumes the one before, saves after every iteration, and is ended within a save by a signal
that nothing handles. With "full", saves fail too, as on a full disk, by a limit on the size of
files. After each run it is resumed here. The last line says how many saves were completed, and how
many failed.
"""

import functools
import logging
import os
import random
import resource
import signal
import sys

import torch
from detectron2.engine import hooks
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.errors import CheckpointError
from d2_memfit.engine.checkpoint import MemfitCheckpointer


class Toy(nn.Module):
    """All weights are equal, and a function of the number of steps."""

    def __init__(self, size=200):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))

    def forward(self, batch):
        return {"loss": self.weight.sum()}


def trainer_of(output_dir, checkpointer_class=MemfitCheckpointer, size=200, max_to_keep=3):
    """A trainer and its checkpointer, which saves after every iteration."""
    model = Toy(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    trainer = AccumulatingTrainer(model, iter(lambda: [{}], None), optimizer)
    checkpointer = checkpointer_class(model, str(output_dir), trainer=trainer)
    saver = hooks.PeriodicCheckpointer(checkpointer, 1, max_to_keep=max_to_keep)
    # The last iteration is saved like the others.
    only_periodic = hooks.CallbackHook(before_train=lambda _: setattr(saver, "max_iter", None))
    trainer.register_hooks([saver, only_periodic])
    return trainer, checkpointer


@functools.lru_cache(None)
def weight_after(iteration):
    """That of a run without interruptions, and the momentum."""
    if iteration < 0:
        return torch.ones(1), torch.zeros(1)
    weight, momentum = weight_after(iteration - 1)
    momentum = momentum * 0.9 + 1
    return weight - 1e-5 * momentum, momentum


def resumed(output_dir, **kwargs):
    """A trainer that has resumed the run in a folder, after a look at its weights."""
    trainer, checkpointer = trainer_of(output_dir, **kwargs)
    checkpointer.resume_or_load("", resume=True)
    if not checkpointer.has_checkpoint():
        return trainer, -1
    for i in range(trainer.iter):
        weight_after(i)
    expected, _ = weight_after(trainer.iter)
    weights = trainer.model.weight
    torch.testing.assert_close(weights, expected.expand_as(weights), rtol=1e-6, atol=1e-6)
    assert len(trainer.optimizer.state) == 1
    return trainer, trainer.iter


class Reporting(MemfitCheckpointer):
    """Says on a pipe when a save begins, and when it was completed; a later one is not."""

    pipe = None
    whole = 0  # saves that may be completed

    def save(self, name, **kwargs):
        os.write(self.pipe, b"begin\n")
        self.whole -= 1
        if self.whole < 0:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.008))
        super().save(name, **kwargs)
        signal.setitimer(signal.ITIMER_REAL, 0)
        has_failed = self.get_checkpoint_file() != os.path.join(self.save_dir, f"{name}.pth")
        os.write(self.pipe, b"failed\n" if has_failed else f"{kwargs['iteration']}\n".encode())


def run(output_dir, pipe, limit):
    # A save that no limit stops is completed at least once, however slow the machine is.
    Reporting.pipe, Reporting.whole = pipe, random.randrange(limit == 10**7, 4)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    trainer, start = resumed(output_dir, checkpointer_class=Reporting)
    trainer.train(start + 1, 10**6)


def main(kind, num_runs, seed, output_dir):
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    last, completed, failed = -1, 0, 0
    for number in range(num_runs):
        random.seed(f"{seed} {number}")
        here, there = os.pipe()
        limit = [100, 10**5, 3 * 10**5, 10**7][number % 4] if kind == "full" else 0
        child = os.fork()
        if not child:
            os.close(here)
            logging.disable()
            run(output_dir, there, limit)
        os.close(there)
        with open(here) as pipe:
            lines = pipe.read().split()
        _, status = os.waitpid(child, 0)
        assert (os.WTERMSIG(status), lines[-1]) == (signal.SIGALRM, "begin")
        done = [int(line) for line in lines if line.isdigit()]
        completed, failed = completed + len(done), failed + lines.count("failed")
        last = max([last, *done])
        try:
            _, found = resumed(output_dir)
        except CheckpointError as e:
            raise AssertionError(f"run {number}: nothing can be resumed: {e}") from e
        assert last <= found <= last + 1, f"run {number}: {found} was resumed, {last} was saved"
        last = found
    print(completed, failed)


if __name__ == "__main__":
    kind, num_runs, seed, output_dir = sys.argv[1:]
    main(kind, int(num_runs), int(seed), output_dir)
