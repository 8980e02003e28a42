#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Plan the training of a released RF-DETR model, without a GPU.

python projects/RFDETR/plan_rfdetr.py RFDETRSegNano [--budget-gb 3.5] [--images 16] [--objects 50]
"""

import argparse

import rfdetr.config
from rfdetr.config import TrainConfig
from window_module import job_of

from d2_memfit import plan_memory
from d2_memfit.planner.text import answer_of_plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="class of rfdetr, such as RFDETRSegNano")
    parser.add_argument("--budget-gb", type=float, default=3.5)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--objects", type=int, default=50)
    args = parser.parse_args()
    if not hasattr(rfdetr.config, f"{args.model}Config"):
        parser.error(f"rfdetr has no {args.model}: name one of its classes, such as RFDETRSegNano")
    model_config = getattr(rfdetr.config, f"{args.model}Config")(pretrain_weights=None)
    train_config = TrainConfig(dataset_dir=".", batch_size=args.images)
    job = job_of(model_config, train_config, args.objects)
    print(answer_of_plan(plan_memory(job, budget_gb=args.budget_gb, allow=["exact"])))


if __name__ == "__main__":
    main()
