# Copyright (c) the d2_memfit developers.
"""Estimates against the same jobs run on the CPU.

A job has two images of 480 x 640 pixels with 20 objects each, in two micro-batches, as the worst
batch of an estimate. Tensors are counted byte by byte in both. The process's overhead is the growth
of its private memory in the real run, beyond the tensors. Each config runs in its own process.
"""

import argparse
import multiprocessing

from d2_memfit.common.units import MB
from d2_memfit.config import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.memory import TensorMeter, process_memory, return_large_blocks
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, run_for_real

from .common import machine, markdown_table, sampled_data_bytes

CASE = WorstCase((480, 640), 20)
CONFIGS = (
    "COCO-Detection/faster_rcnn_R_50_C4_1x.yaml",
    "COCO-Detection/faster_rcnn_R_50_DC5_1x.yaml",
    "COCO-Detection/faster_rcnn_R_101_FPN_3x.yaml",
    "COCO-Detection/retinanet_R_50_FPN_1x.yaml",
    "COCO-Detection/rpn_R_50_FPN_1x.yaml",
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x.yaml",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x.yaml",
    "Misc/cascade_mask_rcnn_R_50_FPN_3x.yaml",
    "Misc/mask_rcnn_R_50_FPN_3x_gn.yaml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="configs of Detectron2's zoo")


def run(args: argparse.Namespace) -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [[config, *pool.apply(compare, (config,))] for config in args.configs]
    phases = ("training", "evaluation")
    header = ["config"]
    for phase in phases:
        header += [f"{phase}, MB estimated", "measured", "error"]
    print(f"{machine()}\n")
    print(markdown_table([*header, "process, MB over tensors"], rows))


def compare(config: str) -> list[str]:
    return_large_blocks()
    cfg = load_cfg(config)
    cfg.MODEL.DEVICE = "cpu"
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.MEMFIT.MICRO_BATCH = 1
    before = process_memory().data_bytes
    dry_job = DryJob(Job.from_cfg(cfg, 1, batch=CASE), DeviceModel.load("cpu"))
    cells = []
    timelines = [t for t in (dry_job.training, dry_job.evaluation) if t is not None]
    with TensorMeter() as meter:
        for timeline, _ in zip(timelines, run_for_real(dry_job, "cpu")):
            estimated = sum(timeline.peak().values())
            measured = meter.peak_bytes
            error = f"{estimated / measured - 1:+.3%}"
            cells += [f"{estimated / MB:.1f}", f"{measured / MB:.1f}", error]
            meter.peak_bytes = meter.live_bytes
    peaks = [sum(timeline.peak().values()) for timeline in timelines]
    with sampled_data_bytes() as samples:
        for _ in run_for_real(dry_job, "cpu"):
            pass
    highest = max(num_bytes for _, num_bytes in samples)
    return [*cells, f"{(highest - before - max(peaks)) / MB:.0f}"]
