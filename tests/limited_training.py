# Copyright (c) the d2_memfit developers.
"""Train a real model in a process of its own, under a limit on its memory.

    python limited_training.py FAMILY {plain,split} EXTRA_MB OUTPUT_DIR

FAMILY is "proposal_network" or "mask_rcnn", with a ResNet-50 and FPN as in Detectron2's zoo. The
process may take EXTRA_MB MiB more than it has taken when training begins; 0 is no limit. Writes the
weights after an iteration of 8 images to OUTPUT_DIR/weights.pth.
"""

import os
import sys
from pathlib import Path

import torch
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from injection import iterate, seed_all
from tiny import every_anchor_counts, images

from d2_memfit import AccumulatingTrainer
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.memory import enforce_budget, process_memory

ITERATIONS = 1
BATCH = 8
SIZE = 320


def main(family, kind, extra_mb, output_dir):
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch.set_flush_denormal(True)  # as in conftest.py
    cfg = load_cfg("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml")
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.PIXEL_STD = [300.0, 300.0, 300.0]  # keeps the activations of random weights small
    if family == "proposal_network":
        cfg.MODEL.META_ARCHITECTURE = "ProposalNetwork"
        every_anchor_counts(cfg)
        cfg.MODEL.RPN.BATCH_SIZE_PER_IMAGE = 10**5
        cfg.MODEL.RPN.LOSS_WEIGHT = 100.0
    seed_all()
    model = build_model(cfg)
    loader = [images(BATCH, first=BATCH * i, size=SIZE) for i in range(ITERATIONS + 1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    # What the first step of a process allocates once, and momentum, is there before the limit.
    iterate(AccumulatingTrainer(model, loader[-1:], optimizer, micro_batch_size=1))
    optimizer.zero_grad(set_to_none=True)
    if extra_mb:
        enforce_budget((process_memory().data_bytes / 2**20 + extra_mb) / 2**10, "cpu")
    if kind == "plain":
        trainer = SimpleTrainer(model, loader, optimizer)
    else:
        options = RecoveryOptions(output_dir=output_dir)
        trainer = AccumulatingTrainer(model, loader, optimizer, recovery=options)
    seed_all()
    iterate(trainer, ITERATIONS)
    torch.save(model.state_dict(), Path(output_dir) / "weights.pth")


if __name__ == "__main__":
    family, kind, extra_mb, output_dir = sys.argv[1:]
    main(family, kind, int(extra_mb), output_dir)
