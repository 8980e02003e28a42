# Copyright (c) the d2_memfit developers.
"""Devices as data, against figures that nobody here made."""

import pytest
import torch
from benchmarks import zoo

from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.timeline import Allocate, Allocation, Free, Timeline, Workspace

MB = 2**20


def test_an_estimate_is_what_detectron2s_zoo_took():
    config = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
    assert zoo.estimate(config) == pytest.approx(zoo.published_memory()[config], rel=0.08)


class Gpu:
    """As torch.cuda.get_device_properties() gives it."""

    def __init__(self, name, capability, gigabytes):
        self.name, self.total_memory = name, int(gigabytes * 2**30)
        self.major, self.minor = capability


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (Gpu("Tesla T4", (7, 5), 14.56), "t4"),
        (Gpu("Tesla V100-PCIE-16GB", (7, 0), 15.77), "v100"),
        (Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 39.38), "a100"),
        (Gpu("NVIDIA GeForce RTX 3060 Laptop GPU", (8, 6), 5.8), "rtx_3060_laptop"),
        (Gpu("NVIDIA GeForce GTX 1060 3GB", (6, 1), 2.94), "gtx_1060_3gb"),
        (Gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 4.75), "cuda"),
        (Gpu("NVIDIA GeForce RTX 6060", (13, 0), 15), "cuda"),
    ],
)
@pytest.mark.parametrize("name", [None, "auto"])
def test_the_card_that_is_there_is_taken(gpu, expected, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    device = DeviceModel.choose(name, "cuda")
    assert device.name == expected, "cuda: no row has this name"
    assert ("a current CUDA card" in device.description) == (expected == "cuda")
    assert "8 GB shared with the CPU" in DeviceModel.choose("jetson_orin_nano", "cuda").description
    assert DeviceModel.choose(name, "cpu").name == "cpu"


def test_all_memory_has_an_owner_and_workspaces_count_while_they_are_needed():
    activation = Allocation(300 * MB, "activations: backbone", "forward")
    events = [Allocate(activation), Workspace(30 * MB, "forward"), Free(activation)]
    device = DeviceModel.load("h100")
    one, two, eight = (device.use(Timeline(events), ranks=ranks) for ranks in (1, 2, 8))
    assert one.breakdown["activations: backbone"] == 300 * MB
    assert one.breakdown["workspace"] == 30 * MB
    assert one.outside["context"] == 500 * MB
    assert one.outside["loaded kernels"] == 200 * MB
    assert "NCCL" not in one.outside
    assert (two.outside["NCCL"], eight.outside["NCCL"]) == (544 * MB, 688 * MB)
    assert one.total_bytes == sum(one.breakdown.values()) + sum(one.outside.values())
