# Copyright (c) the d2_memfit developers.
"""d2_memfit: ``AccumulatingTrainer``, as README.md and docs/RECOVERY.md say."""

from d2_memfit import AccumulatingTrainer
from d2_memfit.compat import create_ddp_model
from d2_memfit.engine import RecoveryOptions, launch

from .job import Job


def train(job: Job, policy: str) -> None:
    """Train a job; ``policy`` is MEMFIT.OOM.POLICY."""
    launch(_train, 1, args=(job, policy))


def _train(job: Job, policy: str) -> None:
    model, optimizer = job.build()
    model = create_ddp_model(model, broadcast_buffers=False)  # as in DefaultTrainer
    recovery = RecoveryOptions(output_dir=str(job.output_dir)) if policy == "split" else None
    trainer = AccumulatingTrainer(
        model,
        job.loader(),
        optimizer,
        accumulation_steps=job.accumulation_steps,
        recovery=recovery,
    )
    trainer.train(0, -(-job.num_batches() // job.accumulation_steps))
