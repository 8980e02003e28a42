# Copyright (c) the d2_memfit developers.
"""The hooks that the config node MEMFIT.MONITOR turns on."""

from typing import Optional

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm

from .leak_detector import LeakDetector
from .memory_monitor import MemoryMonitor
from .memory_snapshot import MemorySnapshot

__all__ = ["memory_hooks"]


def memory_hooks(
    monitor: CfgNode, output_dir: str, budget_gb: Optional[float] = None
) -> list[HookBase]:
    """The hooks of a node MEMFIT.MONITOR. Register them before all others, on all ranks."""
    made: list[HookBase] = []
    if monitor.SNAPSHOT_ITER is not None or monitor.SNAPSHOT_ON_OOM:
        folder = output_dir if comm.is_main_process() else f"{output_dir}/rank{comm.get_rank()}"
        made.append(MemorySnapshot(folder, monitor.SNAPSHOT_ITER, monitor.SNAPSHOT_ON_OOM))
    if monitor.PERIOD is not None:
        made.append(MemoryMonitor(monitor.PERIOD, budget_gb))
    if monitor.LEAK_WINDOW is not None:
        made.append(LeakDetector(monitor.LEAK_WINDOW))
    return made
