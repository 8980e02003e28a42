# Copyright (c) the d2_memfit developers.
"""Devices as data, against figures that nobody here made."""

import statistics

import pytest
import torch
from benchmarks import zoo
from scipy.stats import spearmanr

from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.timeline import Allocate, Allocation, Free, Timeline, Workspace

MB = 2**20
CUDA = DeviceModel.load("cuda")


def timeline(*events):
    return Timeline(events=list(events))


def test_an_estimate_is_what_detectron2s_zoo_took():
    config = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
    assert zoo.estimate(config) == pytest.approx(zoo.published_memory()[config], rel=0.08)


@pytest.mark.sweep
def test_estimates_are_what_detectron2s_whole_zoo_took():
    published = zoo.published_memory()
    pairs = [(gb, zoo.estimate(config)) for config, gb in published.items()]
    errors = sorted(abs(estimate - gb) / gb for gb, estimate in pairs)
    assert statistics.median(errors) <= 0.03
    assert errors[int(0.9 * len(errors))] <= 0.12
    assert spearmanr(pairs).statistic >= 0.95


def test_the_breakdown_adds_up_and_workspaces_count_while_they_are_needed():
    activation = Allocation(100 * MB, "activations: backbone", "forward")
    run = timeline(Allocate(activation), Workspace(30 * MB, "forward"), Free(activation))
    use = DeviceModel.load("cuda").use(run)
    assert sum(use.breakdown.values()) == use.allocated_bytes
    assert use.breakdown["activations: backbone"] == 100 * MB
    assert use.breakdown["workspace"] == 30 * MB
    assert use.total_bytes == use.reserved_bytes + 600 * MB


class Gpu:
    """As torch.cuda.get_device_properties() gives it."""

    def __init__(self, name, capability, gigabytes):
        self.name, self.total_memory = name, int(gigabytes * 2**30)
        self.major, self.minor = capability


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (Gpu("Tesla T4", (7, 5), 14.56), "t4"),
        (Gpu("Tesla V100-SXM2-32GB", (7, 0), 31.73), "v100_32gb"),
        (Gpu("Tesla V100-PCIE-16GB", (7, 0), 15.77), "v100_pcie"),
        (Gpu("NVIDIA GeForce RTX 3060", (8, 6), 11.62), "rtx_3060"),
        (Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 39.38), "a100"),
        (Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.1), "h100"),
        (Gpu("NVIDIA GeForce RTX 3060 Laptop GPU", (8, 6), 5.8), "rtx_3060_laptop"),
        (Gpu("NVIDIA GeForce RTX 2070", (7, 5), 7.8), "rtx_2070"),
        (Gpu("Tesla P100-PCIE-16GB", (6, 0), 15.9), "p100"),
        (Gpu("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 15.6), "rtx_3080_laptop_16gb"),
        (Gpu("NVIDIA GeForce GTX 1060 3GB", (6, 1), 2.94), "gtx_1060_3gb"),
        (Gpu("NVIDIA L4", (8, 9), 22), "l4"),
        (Gpu("NVIDIA RTX A4000", (8, 6), 15.7), "rtx_a4000"),
        (Gpu("NVIDIA GeForce RTX 4090 D", (8, 9), 23.5), "rtx_4090_d"),
        (Gpu("NVIDIA L40S", (8, 9), 44.4), "l40s"),
        (Gpu("NVIDIA GeForce RTX 5090", (12, 0), 31.3), "rtx_5090"),
        (Gpu("NVIDIA GH200 480GB", (9, 0), 94.5), "gh200"),
        (Gpu("Orin", (8, 7), 7.4), "cuda"),
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
    assert DeviceModel.choose("v100", "cuda").name == "v100"
    assert DeviceModel.choose(name, "cpu").name == "cpu"


@pytest.mark.parametrize("name", ["GTX 1650 4GB", "NVIDIA GeForce GTX 1650", "gtx_1650"])
def test_a_card_keeps_its_guard_however_it_is_written(name):
    assert DeviceModel.load(name) == DeviceModel.load("gtx_1650")
    assert DeviceModel.load(name).float16_fails


def test_memory_that_the_cpu_shares_is_said():
    assert "8 GB shared with the CPU" in DeviceModel.load("jetson_orin_nano").description


def test_what_is_outside_the_allocator_has_names():
    activation = Allocation(300 * MB, "activations: backbone", "forward")
    events = timeline(Allocate(activation), Free(activation))
    device = DeviceModel.load("h100")
    one, two, eight = (device.use(events, ranks=ranks) for ranks in (1, 2, 8))
    assert one.outside["context"] == 500 * MB
    assert one.outside["loaded kernels"] == 200 * MB
    assert "NCCL" not in one.outside
    assert (two.outside["NCCL"], eight.outside["NCCL"]) == (544 * MB, 688 * MB)
    for use in (one, two, eight):
        assert use.total_bytes == sum(use.breakdown.values()) + sum(use.outside.values())
