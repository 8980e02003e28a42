# Copyright (c) the d2_memfit developers.
r"""Fine-tune a LazyConfig whole, with adapters and with a frozen backbone, for equal CPU times.

    python projects/ViTDet/measure_fine_tuning.py --config-file CONFIG.py --seconds 90 \
        --weights WEIGHTS.pth [path.key=value ...]

It prints a row for each: millions of trained parameters, MB of an iteration at its peak,
iterations, their CPU time, box and mask AP.
"""

import argparse
import time
from typing import Any

from detectron2.config import LazyConfig, instantiate
from detectron2.engine import hooks
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import setup_logger
from omegaconf import DictConfig
from torch import nn

from d2_memfit import Job, estimate_memory
from d2_memfit.engine import MemfitCheckpointer, build_trainer
from d2_memfit.evaluation import use_available_implementation

WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters of rank 8": {"fine_tune": {"lora_rank": 8}},
    "frozen backbone": {"fine_tune": {"frozen": ["backbone"]}},
}
TRIED = 3  # iterations, to know how long one takes


def train(cfg: DictConfig, weights: str, max_iter: int) -> tuple[Job, nn.Module]:
    """Train with the config's schedule, shrunk to a number of iterations."""
    seed_all_rng(0)
    cfg.train.max_iter = max_iter
    job = Job.from_lazy(cfg)
    trainer = build_trainer(job)
    MemfitCheckpointer(trainer.model).load(weights, checkpointables=[])
    trainer.register_hooks([hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier))])
    trainer.train(0, max_iter)
    return job, trainer.model


def measure(name: str, cfg: DictConfig, weights: str, seconds: float) -> str:
    cfg.train.memfit = {**cfg.train.memfit, **WAYS[name]}
    peak_gb = estimate_memory(cfg, device="cpu").peak_allocated_gb
    start = time.process_time()
    train(cfg, weights, TRIED)
    max_iter = round(seconds * TRIED / (time.process_time() - start))
    start = time.process_time()
    job, model = train(cfg, weights, max_iter)
    spent = time.process_time() - start
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    results = job.parts.test(model)
    return (
        f"| {name} | {trained / 1e6:.2f} | {peak_gb * 1024:.0f} | {max_iter} | "
        f"{spent:.0f} | {results['bbox']['AP']:.1f} | {results['segm']['AP']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", required=True)
    parser.add_argument("--seconds", type=float, default=90.0, help="CPU time of each training")
    parser.add_argument("--only", choices=WAYS, help="one of the ways")
    parser.add_argument("--weights", required=True)
    parser.add_argument("opts", nargs="*")
    args = parser.parse_args()
    setup_logger()
    for name in [args.only] if args.only else WAYS:
        cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
        use_available_implementation(cfg.dataloader.evaluator)
        cfg.train.device = "cpu"
        cfg.dataloader.train.num_workers = cfg.dataloader.test.num_workers = 0  # and their time
        print(measure(name, cfg, args.weights, args.seconds), flush=True)


if __name__ == "__main__":
    main()
