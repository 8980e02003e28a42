# Copyright (c) the d2_memfit developers.
"""A run that saves all the time, and whose weights say which iteration they are of.

    python saving.py {kill,full} NUM_RUNS SEED OUTPUT_DIR

Each run resumes the one before, saves after every iteration, and is killed by SIGKILL: every second
one within a save. With "full", saves fail too, as on a full disk, by a limit on the size of files.
After each run it is resumed here. The last line says how many saves were completed, how many
failed, and how many runs were killed within a save.
"""

import functools
import logging
import os
import random
import resource
import select
import signal
import sys
import time

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
    """Says when a save begins, and when it was completed, on a pipe."""

    pipe = None

    def save(self, name, **kwargs):
        os.write(self.pipe, b"begin\n")
        super().save(name, **kwargs)
        has_failed = self.get_checkpoint_file() != os.path.join(self.save_dir, f"{name}.pth")
        os.write(self.pipe, b"failed\n" if has_failed else f"{kwargs['iteration']}\n".encode())


def run(output_dir, pipe, limit):
    Reporting.pipe = pipe
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    trainer, start = resumed(output_dir, checkpointer_class=Reporting)
    trainer.train(start + 1, 10**6)


def read_for(pipe, seconds, until=None):
    """What was written to the pipe within a time, or until a line comes."""
    end, text = time.monotonic() + seconds, ""
    while (left := end - time.monotonic()) > 0 and not (until and until in text):
        if select.select([pipe], [], [], left)[0]:
            text += os.read(pipe, 2**16).decode()
    return text


def read_rest(pipe):
    """What is in the pipe already."""
    text = ""
    while select.select([pipe], [], [], 0)[0] and (more := os.read(pipe, 2**16)):
        text += more.decode()
    return text


def stop_within_a_save(child, pipe):
    """What was written until the process stands still at a random moment of a save.

    A save that was over before the process stopped is let go, however busy the machine is.
    """
    text = ""
    for _ in range(200):
        text += read_for(pipe, 10, until="begin\n")
        time.sleep(random.uniform(0, 0.008))
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        text += read_rest(pipe)
        if text.endswith("begin\n"):
            return text
        os.kill(child, signal.SIGCONT)
    raise AssertionError("no save lasted until the process stopped")


def main(kind, num_runs, seed, output_dir):
    torch.set_num_threads(1)
    random.seed(seed)
    last, completed, failed, within = -1, 0, 0, 0
    for number in range(num_runs):
        here, there = os.pipe()
        limit = [100, 10**5, 3 * 10**5, 10**7][number % 4] if kind == "full" else 0
        child = os.fork()
        if not child:
            os.close(here)
            logging.disable()
            run(output_dir, there, limit)
        os.close(there)
        text = read_for(here, 10, until="begin\n")
        text += read_for(here, random.uniform(0, 0.05))
        if number % 2:
            text += stop_within_a_save(child, here)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        text += read_rest(here)
        os.close(here)
        lines = text.split()
        assert lines, "it did not begin"
        within += lines[-1] == "begin"
        done = [int(line) for line in lines if line.isdigit()]
        completed, failed = completed + len(done), failed + lines.count("failed")
        last = max([last, *done])
        try:
            _, found = resumed(output_dir)
        except CheckpointError as e:
            raise AssertionError(f"run {number}: nothing can be resumed: {e}") from e
        assert last <= found <= last + 1, f"run {number}: {found} was resumed, {last} was saved"
        last = found
    print(completed, failed, within)


if __name__ == "__main__":
    kind, num_runs, seed, output_dir = sys.argv[1:]
    main(kind, int(num_runs), int(seed), output_dir)
