# Copyright (c) the d2_memfit developers.
"""The hooks that a job's config keys turn on."""

from detectron2.engine import HookBase
from detectron2.utils import comm

from ... import compat
from ...job import Job
from .enforce_budget import EnforceBudget
from .leak_detector import LeakDetector
from .memory_monitor import MemoryMonitor
from .memory_snapshot import MemorySnapshot
from .peak_recorder import PeakRecorder

__all__ = ["GatherStates", "job_hooks"]


def job_hooks(job: Job) -> list[HookBase]:
    """The hooks of MEMFIT.MONITOR, BUDGET_GB and OOM, and those that each job has.

    Register them on all ranks, before the hooks that write and save.
    """
    monitor = job.cfg.MEMFIT.MONITOR
    folder = job.cfg.OUTPUT_DIR
    made: list[HookBase] = [GatherStates()]
    if monitor.SNAPSHOT_ITER is not None or monitor.SNAPSHOT_ON_OOM:
        folder = folder if comm.is_main_process() else f"{folder}/rank{comm.get_rank()}"
        made.append(MemorySnapshot(folder, monitor.SNAPSHOT_ITER, monitor.SNAPSHOT_ON_OOM))
    if monitor.PERIOD is not None:
        made.append(MemoryMonitor(monitor.PERIOD, job.budget_gb))
    if monitor.LEAK_WINDOW is not None:
        made.append(LeakDetector(monitor.LEAK_WINDOW))
    if job.budget_gb is not None and job.cfg.MODEL.DEVICE.startswith("cuda"):
        made.append(EnforceBudget(job.budget_gb, job.cfg.MODEL.DEVICE))
    if comm.is_main_process():
        made.append(PeakRecorder(job))
    return made


class GatherStates(HookBase):
    """Calls the trainer's ``gather_states`` just before a hook of any rank saves or evaluates.

    Only rank 0 writes checkpoints, and they contain the states of all ranks. A run may end in an
    evaluation. Register this hook on all ranks, before the hooks that save.
    """

    def before_train(self) -> None:
        self._periods = set().union(*comm.all_gather(compat.periods_of_states(self.trainer)))

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            self.trainer.gather_states()
