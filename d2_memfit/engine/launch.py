# Copyright (c) the d2_memfit developers.
"""Starting the processes of a job, on GPUs or the CPU, or joining those of torchrun."""

import multiprocessing
import os
import signal
import tempfile
from datetime import timedelta
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.engine.launch import DEFAULT_TIMEOUT
from detectron2.utils import comm

from ..common import compat
from ..common.compat import end_with_parent
from ..common.errors import ConfigError
from .ending import signals_passed_on


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
    NCCL refuses two ranks on one GPU.

    Args:
        main_func, num_gpus_per_machine, num_machines, machine_rank, dist_url, args, timeout: as in
            Detectron2.

    SIGTERM, SIGINT, SIGUSR2 and SIGHUP are passed on to the processes that it starts. These get a
    SIGTERM if this process is gone.

    Raises:
        ConfigError: there are fewer GPUs here, or several machines have no address.
        SystemExit: such a signal ended the processes. The status is 128 + its number.
    """
    ranks_here, num_ranks = num_gpus_per_machine, world_size(num_gpus_per_machine, num_machines)
    if _is_torchrun():
        ranks_here, local_rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        first = int(os.environ["RANK"]) - local_rank
        run_rank(local_rank, "env://", num_ranks, ranks_here, first, timeout, main_func, args)
    elif num_ranks == 1:
        main_func(*args)
    elif torch.cuda.is_available() and ranks_here > torch.cuda.device_count():
        here = f"there are {torch.cuda.device_count()} GPUs here (CUDA_VISIBLE_DEVICES)"
        raise ConfigError(f"--num-gpus {ranks_here}: {here}. Lower it")
    elif dist_url == "auto" and num_machines > 1:
        raise ConfigError("--dist-url auto works on one machine; name the first one's address")
    else:
        # A file, unlike a port, is always free.
        with signals_passed_on(), tempfile.TemporaryDirectory() as folder:
            url = f"file://{folder}/rendezvous" if dist_url == "auto" else dist_url
            first = machine_rank * ranks_here
            of_each = (url, num_ranks, ranks_here, first, timeout, main_func, args)
            started = mp.spawn(run_rank, args=of_each, nprocs=ranks_here, join=False)
            while not started.join():
                pass


def world_size(num_gpus_per_machine: int, num_machines: int = 1) -> int:
    """Number of ranks that :func:`launch` would start with these arguments."""
    if _is_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return max(1, num_gpus_per_machine * num_machines)


def _is_torchrun() -> bool:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names)


def run_rank(
    local_rank: int,
    url: Optional[str],
    num_ranks: int,
    ranks_here: int,
    first: int,
    timeout: timedelta,
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the other ranks, and call the function. ``first`` is the first rank of this machine."""
    if multiprocessing.parent_process() is not None:
        # As in a process that a person starts. A worker that is spawned, and gets a signal while it
        # imports, leaves this process in a write to it for ever (multiprocessing's
        # popen_spawn_posix.py).
        multiprocessing.set_start_method(None, force=True)
        if not torch.cuda.is_available():
            torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
    end_with_parent(signal.SIGTERM)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus:
        torch.cuda.set_device(local_rank % num_gpus)
    store, rank = None, first + local_rank
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if url == "env://" and attempt is not None and ranks_here == num_ranks:
        # From PyTorch 2.5 on, torchrun keeps one store for all its restarts, with the addresses of
        # dead ranks (pytorch#135712). Each machine counts restarts for itself.
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        store, url = dist.PrefixStore(f"attempt_{attempt}", store), None
    backend = "nccl" if num_gpus >= ranks_here else "gloo"
    dist.init_process_group(backend, url, timeout, num_ranks, rank, store)
    compat.create_local_process_group(ranks_here)
    comm.synchronize()
    main_func(*args)
    dist.destroy_process_group()
