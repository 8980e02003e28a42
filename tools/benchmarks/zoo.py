"""Estimates against the training memory that Detectron2's model zoo publishes.

The published figures are of 8 V100, from upstream's MODEL_ZOO.md (zoo_train_memory.csv beside this
file). Configs with deformable convolutions are left out: they need compiled operators. The datasets
need not be there; 100 instances in each image are assumed.
"""

import argparse
import csv
import statistics
from pathlib import Path

import torch

from d2_memfit import estimate_memory
from d2_memfit.config import load_cfg

from .common import markdown_table

PUBLISHED = Path(__file__).with_name("zoo_train_memory.csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", default=PUBLISHED, help="with columns config, train_mem_gb")


def run(args: argparse.Namespace) -> None:
    rows = []
    for config, published in published_memory(args.csv).items():
        estimated = estimate(config)
        rows.append((config, published, estimated, estimated / published - 1))
    table = [(c, p, f"{e:.2f}", f"{error:+.1%}") for c, p, e, error in rows]
    print(markdown_table(["config", "published GB", "estimated GB", "error"], table))
    errors = [abs(error) for *_, error in rows]
    print(f"\nMedian of the absolute errors {statistics.median(errors):.1%};", end=" ")
    print(f"{sum(e <= 0.2 for e in errors)} of {len(errors)} rows within 20%;", end=" ")
    print(f"Spearman's correlation {rank_correlation([r[1:3] for r in rows]):.3f}.")


def published_memory(path: Path = PUBLISHED) -> dict[str, float]:
    with open(path, newline="") as f:
        rows = {row["config"]: float(row["train_mem_gb"]) for row in csv.DictReader(f)}
    return {config: gb for config, gb in rows.items() if "dconv" not in config}


def estimate(config: str) -> float:
    cfg = load_cfg(config)
    return estimate_memory(cfg, num_gpus=8, device="v100").peak_allocated_gb


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's: Pearson's of the ranks, with the mean rank for ties."""
    ranks = [[_rank(values, v) for v in values] for values in zip(*pairs)]
    return torch.corrcoef(torch.tensor(ranks))[0, 1].item()


def _rank(values: tuple[float, ...], value: float) -> float:
    return sum(v < value for v in values) + (values.count(value) - 1) / 2
