# Copyright (c) the d2_memfit developers.
import pytest
import torch
from forks import FORKED_RANKS, run_forked

from d2_memfit.common.errors import ConfigError
from d2_memfit.engine.launch import launch, world_size


def test_one_process_is_the_calling_one():
    called = []
    launch(called.append, 1, args=("here",))
    assert called == ["here"]


def test_under_torchrun_the_environment_says_how_many_there_are(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "4")
    assert world_size(1) == 4
    monkeypatch.delenv("LOCAL_RANK")
    assert world_size(1) == 1


def test_ranks_without_a_gpu_or_an_address_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--num-gpus 2: there are 1 GPUs here"):
        launch(print, 2, dist_url="auto")
    with pytest.raises(ConfigError, match="--dist-url auto works on one machine"):
        launch(print, 1, num_machines=2, dist_url="auto")


@pytest.mark.parametrize(
    ("num_gpus", "backend", "gpu"), [(0, "gloo", None), (1, "gloo", 0), (2, "nccl", 1)]
)
def test_only_ranks_with_a_gpu_each_use_nccl(num_gpus, backend, gpu, monkeypatch):
    def init_process_group(name, *_):
        chosen.append(name)
        raise KeyboardInterrupt  # nothing is there to join

    chosen, devices = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(KeyboardInterrupt):
        launch(print, 1)
    assert chosen == [backend]
    assert devices == ([] if gpu is None else [gpu])


RANKS = """
import sys, time
from detectron2.utils import comm
from d2_memfit.engine.launch import launch
from d2_memfit.common.errors import RankError, exit_on_error

@exit_on_error
def rank():
    if comm.get_rank() == 0:
        raise RankError("the connection is lost")
    time.sleep(1)
    sys.exit(7)

if __name__ == "__main__":
    exit_on_error(launch)(rank, 2, 1, 0, "auto")
"""


def test_the_status_is_that_of_the_rank_that_is_the_cause(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    run = run_forked("-c", FORKED_RANKS, script)
    assert run.returncode == 7, run.stderr
    assert run.stderr.count("error: the connection is lost") == 1
