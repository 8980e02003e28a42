#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Measure memory and time of each training option by dry runs, for the README's table.

    projects/Transformers/measure_options.py [NAME ...]

Each row has one image in mixed precision, unless its name says otherwise, on the device family
"cuda".
"""

import sys
from pathlib import Path
from typing import Any

from d2_transformers import Trainer, add_transformers_config

from d2_memfit import estimate_memory
from d2_memfit.config.load import load_cfg

CONFIGS = Path(__file__).parent / "configs"
SEG = "rf_detr_seg_nano"
BLOCKS = ["*.backbone.encoder.layer.*", "*.decoder.layers.*", "model.blocks.*"]

# Name, config and changed keys.
ROWS: dict[str, tuple[str, list[Any]]] = {
    "batch 1": (SEG, []),
    "batch 2": (SEG, ["SOLVER.IMS_PER_BATCH", 2]),
    "batch 4": (SEG, ["SOLVER.IMS_PER_BATCH", 4]),
    "resolution 320": (SEG, ["TRANSFORMERS.RESOLUTION", 320]),
    "resolution 512": (SEG, ["TRANSFORMERS.RESOLUTION", 512]),
    "resolution 640": (SEG, ["TRANSFORMERS.RESOLUTION", 640]),
    "size small": ("rf_detr_seg_small", []),
    "size base": ("rf_detr_seg_base", []),
    "size medium": ("rf_detr_seg_medium", []),
    "size large": ("rf_detr_seg_large", []),
    "accumulation 8": (SEG, ["SOLVER.ACCUMULATION_STEPS", 8]),
    "multi-scale": (SEG, ["TRANSFORMERS.MULTI_SCALE_STEPS", 3]),
    "queries 200": (SEG, ["TRANSFORMERS.NUM_QUERIES", 200]),
    "queries 100": (SEG, ["TRANSFORMERS.NUM_QUERIES", 100]),
    "float32": (SEG, ["SOLVER.AMP.ENABLED", False]),
    "bfloat16": (SEG, ["MEMFIT.AMP_DTYPE", "bfloat16"]),
    "checkpointing": (SEG, ["MEMFIT.CHECKPOINT.MODULES", BLOCKS]),
    "masks as bits": (SEG, ["MEMFIT.MASKS.PACKED", True]),
    "8 workers": (SEG, ["DATALOADER.NUM_WORKERS", 8]),
    "without EMA": (SEG, ["TRANSFORMERS.EMA_DECAY", 0.0]),
    "one group of queries": (SEG, ["TRANSFORMERS.OPTIONS", [["group_detr", 1]]]),
    "detector, batch 1": ("rf_detr_nano", []),
    "detector, batch 2": ("rf_detr_nano", ["SOLVER.IMS_PER_BATCH", 2]),
    "detector, batch 4": ("rf_detr_nano", ["SOLVER.IMS_PER_BATCH", 4]),
}


def main() -> None:
    print("| row | peak allocated, GB | of the device, GB | RAM of a rank, GB |")
    print("| --- | --- | --- | --- |")
    for name in sys.argv[1:] or ROWS:
        config, opts = ROWS[name]
        keys = ["SOLVER.IMS_PER_BATCH", 1, "SOLVER.ACCUMULATION_STEPS", 1, *opts]
        cfg = load_cfg(str(CONFIGS / f"{config}.yaml"), keys, [add_transformers_config])
        estimate = estimate_memory(cfg, device="cuda", trainer=Trainer, evaluates=False)
        numbers = f"{estimate.peak_allocated_gb:.2f} | {estimate.device_total_gb:.2f}"
        print(f"| {name} | {numbers} | {estimate.host_gb:.1f} |", flush=True)


if __name__ == "__main__":
    main()
