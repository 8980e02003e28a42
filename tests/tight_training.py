# Copyright (c) the d2_memfit developers.
"""Plan a tiny job for budgets on the CPU, or train it under one of them.

    python tight_training.py {plan,train} OUTPUT_DIR EXTRA_MB...

A budget is EXTRA_MB MiB more than a process takes before training. "plan" writes each plan to
OUTPUT_DIR/EXTRA_MB.yaml, and prints its fields in a line. "train" trains with one for two
iterations, and is killed if that takes more than a minute of the CPU.
"""

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from tiny import images, tiny_cfg

from d2_memfit import Job, MemfitTrainer
from d2_memfit.config import load_cfg
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.search import Planner
from d2_memfit.planner.writing import describe_plan, planned_yaml

MOST_CPU_S = 60  # training takes 10


class Trainer(MemfitTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        return [images(2, first=2 * i) for i in range(cfg.SOLVER.MAX_ITER)]


def plan(output_dir, extras_mb):
    cfg = tiny_cfg()
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.MAX_ITER = 2
    cfg.DATASETS.TEST = ()
    cfg.OUTPUT_DIR = output_dir
    device = DeviceModel.load("cpu")
    planner = Planner(Job.from_trainer(Trainer, cfg, batch=images(2)), device)
    for extra_mb in extras_mb:
        plan = planner.plan((device.context_mb + int(extra_mb)) / 2**10, ["exact"])
        (Path(output_dir) / f"{extra_mb}.yaml").write_text(planned_yaml(cfg, plan))
        print(json.dumps({**asdict(plan), "text": describe_plan(plan)}))


if __name__ == "__main__":
    kind, output_dir, *extras_mb = sys.argv[1:]
    if kind == "plan":
        plan(output_dir, extras_mb)
    else:
        # Without memory, a run can ask for it again and again, and then it ignores SIGTERM too.
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        Trainer(load_cfg(f"{output_dir}/{extras_mb[0]}.yaml")).train()
