import pytest
import torch

from d2_memfit.engine import launch, usable_device, world_size
from d2_memfit.errors import ConfigError


def test_one_process_is_the_calling_one():
    called = []
    for num_gpus in (0, 1):
        launch(called.append, num_gpus, args=(num_gpus,))
    assert called == [0, 1]


@pytest.mark.parametrize(("gpus", "machines", "ranks"), [(0, 1, 1), (1, 1, 1), (2, 3, 6)])
def test_ranks_are_gpus_times_machines(gpus, machines, ranks):
    assert world_size(gpus, machines) == ranks


def test_under_torchrun_the_environment_says_how_many_there_are(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "4")
    assert world_size(1) == 4
    monkeypatch.delenv("LOCAL_RANK")
    assert world_size(1) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs, Detectron2's launch decides")
def test_several_machines_need_an_address():
    with pytest.raises(ConfigError, match="--dist-url auto works on one machine"):
        launch(print, 1, num_machines=2, dist_url="auto")


def test_a_device_that_is_there_is_kept():
    assert usable_device("cpu") == "cpu"
    assert usable_device("cuda:0") == ("cuda:0" if torch.cuda.is_available() else "cpu")
