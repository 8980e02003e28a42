# Copyright (c) the d2_memfit developers.
"""Starting the processes of a job, on GPUs or the CPU, or joining those of torchrun."""

import logging
import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.engine.launch import DEFAULT_TIMEOUT
from detectron2.utils import comm

from .. import compat
from ..common.checks import check_device
from ..errors import ConfigError
from ..memory import limit_cudnn_cache, limit_ideep_cache
from .ending import follow_launcher, signals_passed_on

__all__ = ["launch", "usable_device", "world_size"]

logger = logging.getLogger(__name__)


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: Optional[str] = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Detectron2's ``launch``, also under torchrun and on machines without a GPU.

    Under torchrun this process is one rank of the job, and the arguments about machines are not
    used. The same holds for any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT. Without a GPU, ``num_gpus_per_machine`` processes share the CPU's
    cores and communicate over gloo. Ranks of torchrun that outnumber the GPUs use gloo too, because
    NCCL refuses two ranks on one GPU. The ranks' libraries keep less for later
    (:func:`~d2_memfit.memory.limit_cudnn_cache`, :func:`~d2_memfit.memory.limit_ideep_cache`).

    Args:
        main_func, num_gpus_per_machine, num_machines, machine_rank, dist_url, args, timeout: as in
            Detectron2.

    SIGTERM, SIGINT, SIGUSR2 and SIGHUP are passed on to the processes that it starts. These get a
    SIGTERM if this process is gone.

    Raises:
        ConfigError: a launcher's variable is not a number, or is out of range.
        SystemExit: such a signal ended the processes. The status is 128 + its number.
    """
    limit_cudnn_cache()
    limit_ideep_cache()
    num_ranks = num_gpus_per_machine * num_machines
    if _is_torchrun():
        num_ranks = _variable("WORLD_SIZE", 1)
        ranks_here = _variable("LOCAL_WORLD_SIZE", 1)
        rank = _variable("RANK", 0, num_ranks)
        local_rank = _variable("LOCAL_RANK", 0, ranks_here)
        _variable("MASTER_PORT", 1, 2**16)
        ranks = _Ranks("env://", num_ranks, ranks_here, rank - local_rank, timeout)
        ranks.run(local_rank, main_func, args)
    elif num_ranks <= 1:
        main_func(*args)
    elif torch.cuda.is_available() and num_gpus_per_machine > torch.cuda.device_count():
        raise ConfigError(
            f"--num-gpus {num_gpus_per_machine}: there are {torch.cuda.device_count()} GPUs here. "
            "Lower it, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    elif dist_url == "auto" and num_machines > 1:
        raise ConfigError("--dist-url auto works on one machine; name the first one's address")
    else:
        # A file, unlike a port, is always free.
        with signals_passed_on(), tempfile.TemporaryDirectory() as folder:
            url = f"file://{folder}/rendezvous" if dist_url == "auto" else dist_url
            ranks_here = num_gpus_per_machine
            ranks = _Ranks(url, num_ranks, ranks_here, machine_rank * ranks_here, timeout)
            started = mp.spawn(
                _run_spawned, args=(ranks, main_func, args), nprocs=ranks_here, join=False
            )
            while not started.join():
                pass


def world_size(num_gpus_per_machine: int, num_machines: int = 1) -> int:
    """Number of ranks that :func:`launch` would start with these arguments.

    Raises:
        ConfigError: WORLD_SIZE is not a valid number of ranks.
    """
    if _is_torchrun():
        return _variable("WORLD_SIZE", 1)
    return max(1, num_gpus_per_machine * num_machines)


def usable_device(name: str, is_asked_for: bool = False) -> str:
    """The device itself; "cpu" for a CUDA device on a machine without one.

    Args:
        is_asked_for: whether the command line names it, so that no other will do.

    Raises:
        ConfigError: PyTorch does not know the device, or cannot compute on it here.
    """
    device = check_device(name)
    number = getattr(torch, device.type).device_count() if hasattr(torch, device.type) else 0
    if device.type == "cuda" and not number and not is_asked_for:
        return "cpu"
    if (device.index or 0) >= number:
        raise ConfigError(f"MODEL.DEVICE {name}: PyTorch sees {number} devices of this kind")
    return name


def _is_torchrun() -> bool:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names)


def _variable(name: str, at_least: int, below: Optional[int] = None) -> int:
    """Value of a variable set by a launcher.

    Raises:
        ConfigError: it is not a number in this range.
    """
    text = os.environ[name]
    allowed = f"at least {at_least}" if below is None else f"{at_least} to {below - 1}"
    if not text.strip().isdecimal() or not at_least <= int(text) < (below or int(text) + 1):
        raise ConfigError(
            f"the environment variable {name} must be a number of {allowed}, got {text!r}. "
            "torchrun sets it; unset it to start without a launcher"
        )
    return int(text)


@dataclass
class _Ranks:
    """How the ranks of this machine find the others."""

    url: Optional[str]
    num_ranks: int
    ranks_here: int
    first: int  # rank of the first one here
    timeout: timedelta

    def run(self, local_rank: int, main_func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Join the other ranks, and call the function."""
        follow_launcher()
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        has_gpu = num_gpus >= self.ranks_here
        if num_gpus:
            torch.cuda.set_device(local_rank % num_gpus)
        if num_gpus and not has_gpu and local_rank == 0:
            logger.warning(
                "%d ranks share %d GPUs, so they communicate over gloo, and each takes its own "
                "memory there. Start as many ranks as there are GPUs",
                self.ranks_here,
                num_gpus,
            )
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        is_one_machine = self.ranks_here == self.num_ranks
        is_counted = self.url == "env://" and restarts is not None and is_one_machine
        dist.init_process_group(
            "nccl" if has_gpu else "gloo",
            init_method=None if is_counted else self.url,
            store=_store_of_attempt(self.timeout, str(restarts)) if is_counted else None,
            world_size=self.num_ranks,
            rank=self.first + local_rank,
            timeout=self.timeout,
        )
        compat.create_local_process_group(self.ranks_here)
        comm.synchronize()
        main_func(*args)
        dist.destroy_process_group()


def _run_spawned(
    local_rank: int, ranks: _Ranks, main_func: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # As in a process that a person starts. A worker that is spawned, and gets a signal while it
    # imports, leaves this process in a write to it for ever (multiprocessing/popen_spawn_posix.py).
    multiprocessing.set_start_method(None, force=True)
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.ranks_here))
    ranks.run(local_rank, main_func, args)


def _store_of_attempt(timeout: timedelta, attempt: str) -> dist.Store:
    """A part of torchrun's store that earlier attempts have not written to.

    Since PyTorch 2.5 torchrun keeps one store for all its restarts, with the addresses of ranks
    that are dead: "Connection refused" (github.com/pytorch/pytorch/issues/135712). Restarts are
    counted by each machine for itself, so this works on one machine only.
    """
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"attempt_{attempt}", store)
