"""Devices as data, against figures that nobody here made."""

import statistics

import pytest
import torch
from benchmarks import zoo
from tiny import ROOT

from d2_memfit.errors import ConfigError
from d2_memfit.planner.device_model import DeviceModel, device_names
from d2_memfit.planner.timeline import Allocate, Allocation, Convolution, Free, Timeline
from d2_memfit.planner.workspaces import WORKSPACES

pytestmark = pytest.mark.slow

MB = 2**20
FOLDER = ROOT / "d2_memfit" / "planner" / "devices"


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
    assert statistics.median(errors) <= 0.08
    assert errors[int(0.9 * len(errors))] <= 0.2
    assert zoo.rank_correlation(pairs) >= 0.95


def test_the_breakdown_adds_up_and_workspaces_count_while_they_are_needed():
    activation = Allocation(100 * MB, "activations: backbone", "forward")
    run = timeline(Allocate(activation), convolution(256, (200, 336)), Free(activation))
    use = DeviceModel.load("v100").use(run)
    assert sum(use.breakdown.values()) == use.allocated_bytes
    assert use.breakdown["activations: backbone"] == 100 * MB
    # 168 tiles of the data, with 512 channels, and 256 x 256 filters, of 32 x 17 complex numbers.
    assert use.breakdown["workspace"] == pytest.approx((168 * 512 + 256**2) * 32 * 17 * 8, rel=0.01)
    assert use.total_bytes == use.reserved_bytes + 1000 * MB


def test_workspaces_depend_on_what_is_convolved():
    fft_or_winograd, layout = WORKSPACES["fft_or_winograd"], WORKSPACES["layout"]
    small = convolution(256, (25, 42))  # filters would be larger than the data: Winograd's tiles
    assert fft_or_winograd(small) == 36 * 4 * (2 * 7 * 11 * 512 + 256 * 256)
    assert fft_or_winograd(convolution(2048, (50, 84), kernel=1)) == 0
    assert layout(small) == 4 * (2 * 2 * 256 * 25 * 42 + 256 * 256 * 9)
    assert layout(convolution(256, (25, 42), dtype=torch.float16)) == layout(small) // 2


def test_gradients_that_a_loop_keeps_are_there_in_the_forward():
    kept = Allocation(100 * MB, "gradients", "setup")
    activation = Allocation(50 * MB, "activations: backbone", "forward")
    new = Allocation(100 * MB, "gradients", "backward")
    events = [Allocate(kept), Free(kept), Allocate(activation), Free(activation), Allocate(new)]
    assert DeviceModel.load("v100").use(timeline(*events)).allocated_bytes >= 150 * MB
    assert DeviceModel.load("cuda").use(timeline(*events)).allocated_bytes < 120 * MB


@pytest.mark.parametrize("name", device_names())
def test_each_device_has_all_that_is_needed(name):
    device = DeviceModel.load(name)
    assert device.flops_per_s.keys() == {"float32", "float16", "bfloat16"}
    assert device.context_mb > 0


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=r"mine.yaml is no file of a device"):
        DeviceModel.load(file)
    file.write_text("description: mine")
    with pytest.raises(ConfigError, match=r"mine.yaml is no file of a device: .*missing"):
        DeviceModel.load(file)
    text = (FOLDER / "cuda.yaml").read_text()
    file.write_text(text.replace("context_mb: 600", "context_mb: 123"))
    assert DeviceModel.load(str(file)).context_mb == 123
    file.write_text(text.replace("bytes_per_s: 360.0e+9", "bytes_per_s: 360e9"))  # text in YAML
    with pytest.raises(ConfigError, match="bytes_per_s must be a number, got '360e9'"):
        DeviceModel.load(file)
    file.write_text(text.replace("flops_per_s: {float32", "flops_per_s: {float64"))
    with pytest.raises(ConfigError, match="flops_per_s must have a number for float32"):
        DeviceModel.load(file)
    file.write_text(text.replace("_workspace: layout", "_workspace: magic"))
    with pytest.raises(ConfigError, match="must be one of none, layout, fft_or_winograd, got 'm"):
        DeviceModel.load(file)
