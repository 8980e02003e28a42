# Copyright (c) the d2_memfit developers.
"""Devices as data, against figures that nobody here made."""

import statistics
from collections import Counter
from dataclasses import replace

import pytest
import torch
from benchmarks import zoo
from scipy.stats import spearmanr
from tiny import ROOT

from d2_memfit.config.cards import CARDS, find_card
from d2_memfit.errors import ConfigError, DataError
from d2_memfit.planner.device import DeviceModel, DoesNotFit, device_model
from d2_memfit.planner.device.device_model import device_names
from d2_memfit.planner.dry_run import (
    Allocate,
    Allocation,
    Convolution,
    Free,
    Operator,
    Timeline,
    Work,
)

pytestmark = pytest.mark.slow

MB = 2**20
FOLDER = ROOT / "d2_memfit" / "planner" / "device" / "devices"


def timeline(*events):
    return Timeline(events=list(events))


def convolution(channels, size, num_images=2, kernel=3, dtype=torch.float32):
    data = torch.Size((num_images, channels, *size))
    weight = torch.Size((channels, channels, kernel, kernel))
    return Convolution("forward", data, weight, data, (1, 1), 1, dtype, "forward")


def test_an_estimate_is_what_detectron2s_zoo_took():
    config = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
    assert zoo.estimate(config) == pytest.approx(zoo.published_memory()[config], rel=0.08)


@pytest.mark.exhaustive
def test_estimates_are_what_detectron2s_whole_zoo_took():
    published = zoo.published_memory()
    pairs = [(gb, zoo.estimate(config)) for config, gb in published.items()]
    errors = sorted(abs(estimate - gb) / gb for gb, estimate in pairs)
    assert statistics.median(errors) <= 0.03
    assert errors[int(0.9 * len(errors))] <= 0.12
    assert spearmanr(pairs).statistic >= 0.95


def test_the_breakdown_adds_up_and_workspaces_count_while_they_are_needed():
    activation = Allocation(100 * MB, "activations: backbone", "forward")
    run = timeline(Allocate(activation), convolution(256, (200, 336)), Free(activation))
    use = DeviceModel.load("cuda").use(run)
    assert sum(use.breakdown.values()) == use.allocated_bytes
    assert use.breakdown["activations: backbone"] == 100 * MB
    # Copies of input and result of 2 images, and of the filters.
    copies = 4 * (2 * 2 * 256 * 200 * 336 + 256 * 256 * 9)
    assert use.breakdown["workspace"] == pytest.approx(copies, rel=0.01)
    assert use.total_bytes == use.reserved_bytes + 600 * MB


def test_workspaces_depend_on_what_is_convolved():
    device = DeviceModel.load("cuda")
    small = convolution(256, (25, 42))
    assert device.workspace_bytes(small) == 4 * (2 * 2 * 256 * 25 * 42 + 256 * 256 * 9)
    half = convolution(256, (25, 42), dtype=torch.float16)
    assert device.workspace_bytes(half) == device.workspace_bytes(small) // 2
    without = replace(device, convolution_workspace="none")
    assert without.workspace_bytes(small) == 0


@pytest.mark.parametrize("name", device_names())
def test_each_device_has_all_that_is_needed(name):
    device = DeviceModel.load(name)
    formats = device.flops_per_s.keys() - {"tf32"}
    assert {"float32", "float16", "bfloat16"} <= formats, f"{name}.yaml: flops_per_s"
    assert device.context_mb > 0
    is_card = name not in ("cpu", "cuda")
    for key in ("device_name", "compute_capability") if is_card else ():
        assert getattr(device, key), f"{name}.yaml has no {key}"


def test_only_cards_from_ampere_on_have_tf32():
    for name in device_names():
        device = DeviceModel.load(name)
        is_ampere = name == "cuda" or float(device.compute_capability or 0) >= 8
        assert ("tf32" in device.flops_per_s) == is_ampere, f"{name}.yaml: flops_per_s"


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
        (Gpu("Orin", (8, 7), 7.4), "jetson_orin_nano"),
        (Gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), 4.75), "a30"),  # the smallest of 8.0
        (Gpu("NVIDIA GeForce RTX 6060", (13, 0), 15), "cuda"),
    ],
)
@pytest.mark.parametrize("name", [None, "auto"])
def test_the_card_that_is_there_is_taken(gpu, expected, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    device = DeviceModel.choose(name, "cuda")
    assert device.name == expected, "if a new device file is the nearer one, change this row"
    assert device.is_card(gpu.name)
    is_taken = "taken for" in device.description
    assert is_taken == (find_card(gpu.name, 0) is None)
    assert not is_taken or device.times.startswith("for ")
    assert DeviceModel.choose("v100", "cuda").name == "v100"
    assert DeviceModel.choose(name, "cpu").name == "cpu"


def test_times_of_generations_without_published_ones_say_so():
    """The generations are those of the cards whose published times were fitted."""
    fitted = ("v100", "rtx_2080_ti", "a100_80gb", "rtx_3090")
    capabilities = {CARDS[device].capability for device in fitted}
    for name, card in CARDS.items():
        text = DeviceModel.load(name).times
        assert ("not tried on this generation" in text) == (card.capability not in capabilities)
    assert "RTX 3060" in DeviceModel.load("cuda").times
    assert "another CPU" in DeviceModel.load("cpu").times


@pytest.mark.parametrize("name", ["GTX 1650 4GB", "NVIDIA GeForce GTX 1650", "gtx_1650"])
def test_a_card_keeps_its_speed_and_its_guard_however_it_is_written(name):
    assert DeviceModel.load(name) == DeviceModel.load("gtx_1650")
    assert DeviceModel.load(name).float16_fails


def test_memory_that_the_cpu_shares_is_said():
    assert "8 GB shared with the CPU" in DeviceModel.load("jetson_orin_nano").description


def seconds_of(device, *operators):
    return device.seconds(Work(Counter(operators)))


def test_time_is_of_what_operators_compute_or_move_and_of_their_launches():
    device = replace(DeviceModel.load("rtx_3060"), is_measured=True, seconds_per_operator=1e-3)
    convolution = Operator("convolution", "float32", 12_700_000_000, 1000)  # a ms of computing
    copy = Operator(num_bytes=360_000_000)  # a ms of moving
    assert seconds_of(device, convolution, convolution) == pytest.approx(4e-3)
    assert seconds_of(device, convolution, copy, copy) == pytest.approx(6e-3)
    half = Operator("matrix product", "float16", 12_750_000_000, 1000)
    assert seconds_of(device, half) == pytest.approx(1.5e-3)


def steps_of(*copied_bytes):
    """A forward of parts of 10 ms, each followed by a copy to the host, and one more part."""
    part = Operator("matrix product", "float32", 127_000_000_000)
    forward, backward = Work(), Work(Counter({part: 2 * len(copied_bytes) + 2}))
    for num_bytes in copied_bytes:
        forward.operators[part] += 1
        forward.copy_to_host(num_bytes)
    forward.operators[part] += 1
    return forward, backward


@pytest.mark.parametrize(
    ("copied_mib", "more_s"),
    [
        ((), 0),
        ((1, 1, 1), 0),  # all run beside the computation
        # The forward waits for it at the next copy, with 10 ms done; the backward, with 20.
        ((600, 0, 0), 0.59 + 0.58),
        ((0, 0, 600), 0),  # the last tensor is still there in the backward
        ((60, 60, 60), 2 * 0.05 + 2 * 0.04),  # of 60 ms, 10 and 20 are hidden
    ],
)
def test_copies_cost_what_computation_does_not_hide(copied_mib, more_s):
    device = replace(
        DeviceModel.load("rtx_3060"),
        is_measured=True,
        seconds_per_operator=0,
        host_bytes_per_s=1000 * MB,
    )
    forward, backward = steps_of(*(mib * MB for mib in copied_mib))
    plain = device.seconds(forward) + device.seconds(backward)
    assert plain == pytest.approx(0.03 * (len(copied_mib) + 1))
    assert device.seconds_with_copies(forward, backward) == pytest.approx(plain + more_s, abs=0.001)


def test_copies_reach_the_share_of_the_bus_that_others_have_measured():
    device = DeviceModel.load("rtx_3060")
    assert 0.6 < device.copied_bytes_per_s / device.host_bytes_per_s < 0.82
    measured = replace(device, is_measured=True)
    assert measured.copied_bytes_per_s == device.host_bytes_per_s


def test_shares_of_the_peaks_are_reached():
    device = replace(DeviceModel.load("a100"), seconds_per_operator=0)
    seconds = {
        (kind, name): seconds_of(device, Operator(kind, name, 10**12))
        for kind in ("convolution", "grouped convolution", "matrix product")
        for name in ("float32", "float16")
    }
    peak = 1e12 / device.flops_per_s["float16"]
    assert 4 * peak < seconds["convolution", "float16"] < 8 * peak
    assert seconds["convolution", "float32"] == 2 * seconds["convolution", "float16"]  # TF32
    assert seconds["matrix product", "float16"] == seconds["convolution", "float16"]
    assert seconds["matrix product", "float32"] > seconds["convolution", "float32"]
    assert seconds["grouped convolution", "float16"] > 5 * seconds["convolution", "float16"]
    moving = seconds_of(device, Operator(num_bytes=10**9))
    assert moving > 1.5 * 1e9 / device.bytes_per_s


def test_sixteen_bits_are_not_slower_than_the_units_for_float32():
    for name in ("rtx_2060", "rtx_3060", "t4", "gtx_1650"):
        device = DeviceModel.load(name)
        half, full = (
            seconds_of(device, Operator("convolution", name, 10**12, 1000))
            for name in ("float16", "float32")
        )
        assert half <= full


def test_what_is_outside_the_allocator_has_names():
    activation = Allocation(300 * MB, "activations: backbone", "forward")
    events = timeline(Allocate(activation), Free(activation))
    device = DeviceModel.load("h100")
    one, two, eight = (device.use(events, ranks=ranks) for ranks in (1, 2, 8))
    assert one.outside["context"] == 500 * MB
    assert one.outside["loaded kernels"] == 200 * MB
    assert one.breakdown["cuBLAS workspaces"] == 64 * MB
    assert "NCCL" not in one.outside
    assert (two.outside["NCCL"], eight.outside["NCCL"]) == (544 * MB, 688 * MB)
    for use in (one, two, eight):
        assert use.total_bytes == sum(use.breakdown.values()) + sum(use.outside.values())
    with pytest.raises(DoesNotFit):
        device.use(events, limit_bytes=one.total_bytes + 100 * MB, ranks=2)


def test_memory_between_blocks_that_a_run_had_counts_without_a_limit_alone():
    run = timeline(Allocate(Allocation(300 * MB, "activations: backbone", "forward")))
    device = DeviceModel.load("cuda")
    as_in_run = replace(device, reserved_factor=1.5)
    plain = device.use(run)
    assert as_in_run.use(run).reserved_bytes == round(1.5 * plain.reserved_bytes)
    assert as_in_run.use(run, plain.total_bytes) == plain


def test_a_file_counts_instead_of_the_row_of_its_card(tmp_path, monkeypatch):
    family = (FOLDER / "cuda.yaml").read_text()
    (tmp_path / "cuda.yaml").write_text(family)
    (tmp_path / "rtx_3060.yaml").write_text(family.replace("context_mb: 400", "context_mb: 321"))
    monkeypatch.setattr(device_model, "_FOLDER", tmp_path)
    assert DeviceModel.load("rtx_3060").context_mb == 321
    assert DeviceModel.load("rtx_3070").context_mb == 400
    assert Counter(device_names())["rtx_3060"] == 1


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    with pytest.raises(DataError, match=r"--device .*mine.yaml cannot be read \(No such file"):
        DeviceModel.load(file)
    file.write_text("description: mine")
    with pytest.raises(DataError, match=r"mine.yaml: the field is_gpu is missing"):
        DeviceModel.load(file)
    text = (FOLDER / "cuda.yaml").read_text()
    file.write_text(text.replace("context_mb: 400", "context_mb: 123"))
    assert DeviceModel.load(str(file)).context_mb == 123
    file.write_text(text.replace("bytes_per_s: 360.0e+9", "bytes_per_s: 360e9"))  # text in YAML
    with pytest.raises(DataError, match="bytes_per_s must be a finite number, got '360e9'"):
        DeviceModel.load(file)
    file.write_text(text.replace("flops_per_s: {float32", "flops_per_s: {float64"))
    with pytest.raises(DataError, match="flops_per_s: the field float32 is missing"):
        DeviceModel.load(file)
    file.write_text(text.replace("_workspace: layout", "_workspace: magic"))
    with pytest.raises(
        ConfigError, match="convolution_workspace must be 'none', 'layout', 'transf"
    ):
        DeviceModel.load(file)
    for numbers in ("500", "[500]", "[true, 500]"):
        file.write_text(text + f"nccl_mb: {numbers}\n")
        with pytest.raises(DataError, match=r"nccl_mb must be tuple\[float, float\], got"):
            DeviceModel.load(file)
