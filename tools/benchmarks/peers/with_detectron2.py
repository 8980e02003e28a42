# Copyright (c) the d2_memfit developers.
"""Plain Detectron2: ``SimpleTrainer``, which has no accumulation.

A bigger batch is a bigger SOLVER.IMS_PER_BATCH:
https://detectron2.readthedocs.io/en/latest/modules/config.html#config-references
"""

from detectron2.engine import SimpleTrainer

from d2_memfit.compat import create_ddp_model
from d2_memfit.engine import launch

from .job import Job


def train(job: Job) -> None:
    # Detectron2's own launch needs GPUs for more than one rank.
    launch(_train, 1, args=(job,))


def _train(job: Job) -> None:
    model, optimizer = job.build()
    model = create_ddp_model(model, broadcast_buffers=False)  # as in DefaultTrainer
    SimpleTrainer(model, job.loader(), optimizer).train(0, job.num_batches())
