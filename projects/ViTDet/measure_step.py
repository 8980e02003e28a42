# Copyright (c) the d2_memfit developers.
"""Measure the memory of a LazyConfig's training step, with and without train.memfit.

    python projects/ViTDet/measure_step.py --config-file CONFIG.py [path.key=value ...]

It runs on the CPU, in float32, with the loader's first batch. Tensors are counted byte by byte.
"""

import argparse
import copy
import time
from typing import Any

import torch
from detectron2.config import LazyConfig, instantiate
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from omegaconf import DictConfig

from d2_memfit import Job
from d2_memfit.memory import TensorMeter


def step(cfg: DictConfig, batch: list[Any]) -> tuple[float, float, float]:
    """Run a step; return the peak in MB of 2^20 bytes, seconds, and the norm of the gradient."""
    torch.manual_seed(0)
    model = Job.from_lazy(cfg).build_model("cpu")
    torch.manual_seed(0)  # for the sampled proposals
    start = time.perf_counter()
    with TensorMeter() as meter, EventStorage():
        sum(model(batch).values()).backward()
    seconds = time.perf_counter() - start
    gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return meter.peak_bytes / 2**20, seconds, torch.stack(gradients).norm().item()


def without_techniques(cfg: DictConfig) -> DictConfig:
    plain = copy.deepcopy(cfg)
    plain.train.memfit = {}
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True)
    parser.add_argument("opts", nargs="*")
    args = parser.parse_args()
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
    seed_all_rng(0)
    batch = next(iter(instantiate(cfg.dataloader.train)))
    for name, config in (("without", without_techniques(cfg)), (f"with {cfg.train.memfit}", cfg)):
        peak, seconds, norm = step(config, batch)
        print(f"{name}: peak {peak:.0f} MB, {seconds:.2f} s, norm of the gradient {norm:.6f}")


if __name__ == "__main__":
    main()
