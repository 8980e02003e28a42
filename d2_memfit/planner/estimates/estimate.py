# Copyright (c) the d2_memfit developers.
"""The memory estimate of a job."""

from pathlib import Path
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ...job import Job, Size
from ..device import DeviceModel
from .dry_job import DryJob, MemoryEstimate
from .from_runs import as_in_run
from .probe import job_class

__all__ = ["estimate_memory", "run_dry"]


def estimate_memory(
    cfg: Union[CfgNode, DictConfig, Job],
    num_gpus: Optional[int] = None,
    device: Optional[Union[str, Path]] = None,
    probe: bool = False,
    *,
    trainer: Any = None,
    batch: Any = None,
    image_size: Optional[Size] = None,
    num_instances: Optional[int] = None,
    evaluates: bool = True,
    run: Optional[Union[str, Path]] = None,
) -> MemoryEstimate:
    """Estimate the memory of a job without a GPU, by a dry run of its largest iteration.

    Args:
        cfg: a config of yacs, a LazyConfig, or a :class:`~d2_memfit.Job`, which has the arguments
            from ``trainer`` to ``num_instances``, and ``num_gpus``, already.
        num_gpus: ranks that train together; SOLVER.IMS_PER_BATCH is for all of them. None is the
            world size of this process.
        device: cpu, cuda, or the name of a card; or the path
            of a device file. None is the CPU with MODEL.DEVICE cpu, else this machine's GPU, else a
            current CUDA card.
        probe: run the iteration on this machine's GPU, and measure it.
        trainer: the class that trains, with the ``build_*`` methods of ``DefaultTrainer``.
        batch: images of the largest batch, see :class:`~d2_memfit.job.given.GivenBatches`; or the
            sizes that the model gets, as a :class:`WorstCase`. With None, the job's own mapper
            makes it from the largest images of its datasets.
        image_size: height and width in pixels of the largest image file.
        num_instances: annotated objects of the most crowded image.
        evaluates: whether to include evaluation, or training alone.
        run: OUTPUT_DIR of an earlier run of this model on this machine. Its peaks correct the
            estimate.

    Raises:
        ConfigError: a value in the config cannot work, its model cannot be built, there is no GPU
            to probe, or ``run`` says nothing about the job.
    """
    job = Job.from_any(
        cfg, trainer, num_gpus, batch=batch, image_size=image_size, num_instances=num_instances
    )
    dry_job = run_dry(job, device, probe, evaluates, run=run)
    return dry_job.estimate(dry_job.limit_bytes, with_range=True)


def run_dry(
    job: Job,
    device: Optional[Union[str, Path]] = None,
    probe: bool = False,
    evaluates: bool = True,
    run: Optional[Union[str, Path]] = None,
) -> DryJob:
    """Make the dry runs of :func:`estimate_memory`, with their timelines.

    Args:
        run: as for :func:`estimate_memory`.
    """
    model = DeviceModel.choose(device, job.cfg.MODEL.DEVICE)
    kind = job_class(probe, model)
    if run is not None:
        model = as_in_run(model, job, run, under_budget=job.budget_gb is not None)
    return kind(job, model, evaluates=evaluates)
