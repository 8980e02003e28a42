"""From a config to the memory that its job needs."""

from pathlib import Path
from typing import Optional, Union

from detectron2.config import CfgNode

from ..checks import check_positive_int
from ..config import check_config, with_memfit_keys
from ..presets import with_budget
from ..scaling import auto_scale_workers
from .device_model import DeviceModel
from .dry_job import DryJob, MemoryEstimate
from .probe import job_class
from .worst_case import WorstCase, worst_case

__all__ = ["estimate_memory", "run_dry"]


def estimate_memory(
    cfg: CfgNode,
    num_gpus: int = 1,
    device: Optional[Union[str, Path]] = None,
    case: Optional[WorstCase] = None,
    probe: bool = False,
) -> MemoryEstimate:
    """What the job of a config needs, without a GPU: a dry run of its largest iteration.

    Args:
        num_gpus: ranks that train together; SOLVER.IMS_PER_BATCH is of all of them.
        device: the name of a family in ``d2_memfit/planner/devices``, or the path of a file of
            ``tools/calibrate_device.py``. None is the CPU with MODEL.DEVICE cpu, else the GPU that
            is there, else a current CUDA card.
        case: sizes and objects of the largest batch. None is :func:`worst_case` of the config.
        probe: run it for real on this machine's GPU, and measure.

    Raises:
        ConfigError: a value in the config cannot work, or its model cannot be built; or there is no
            GPU to be probed.
    """
    dry_job = run_dry(cfg, num_gpus, device, case, probe)
    return dry_job.estimate(dry_job.limit_bytes)


def run_dry(
    cfg: CfgNode,
    num_gpus: int = 1,
    device: Optional[Union[str, Path]] = None,
    case: Optional[WorstCase] = None,
    probe: bool = False,
) -> DryJob:
    """As :func:`estimate_memory`, with the timelines."""
    check_positive_int("num_gpus", num_gpus)
    cfg = with_memfit_keys(cfg)
    check_config(cfg)
    cfg = with_budget(cfg, num_gpus)
    cfg = auto_scale_workers(cfg, num_gpus)
    check_config(cfg, num_gpus)
    model = DeviceModel.choose(device, cfg.MODEL.DEVICE)
    return job_class(probe, model)(cfg, num_gpus, model, case or worst_case(cfg, num_gpus))
