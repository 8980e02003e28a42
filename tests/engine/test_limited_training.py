# Copyright (c) the d2_memfit developers.
"""Real models under a limit that the kernel enforces: plain Detectron2 dies, ours finishes.

    python test_limited_training.py FAMILY {plain,split} EXTRA_MB OUTPUT_DIR

is a process of these tests. FAMILY is "proposal_network" or "mask_rcnn", with a ResNet-50 and FPN
as in the zoo. It may take EXTRA_MB MiB more than it has taken when training begins; 0 is no limit.
It writes the weights after an iteration of 8 images to OUTPUT_DIR/weights.pth.
"""

import sys
from pathlib import Path

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from forks import run_forked
from injection import iterate, read_record, seed_all
from tiny import every_anchor_counts, images, relative_difference

from d2_memfit import AccumulatingTrainer
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.memory import enforce_budget, process_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process"),
]

# 52 MB of these are what libraries take for themselves when the budget is set.
EXTRA_MB = {"proposal_network": 320, "mask_rcnn": 700}
# The proposal network's losses are means over images. The mask loss is one over all masks.
LARGEST_DIFFERENCE = {"proposal_network": 1e-5, "mask_rcnn": 1e-3}


def main(family, kind, extra_mb, output_dir):
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
    loader = [images(8, first=8 * i, size=320) for i in range(2)]
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
    iterate(trainer)
    torch.save(model.state_dict(), Path(output_dir) / "weights.pth")


def train(family, kind, extra_mb, output_dir):
    output_dir.mkdir()
    return run_forked(__file__, family, kind, extra_mb, output_dir, timeout_s=300)


def weights(output_dir):
    return torch.load(output_dir / "weights.pth", weights_only=True)


@pytest.mark.parametrize(
    "family", ["proposal_network", pytest.param("mask_rcnn", marks=pytest.mark.sweep)]
)
def test_training_under_a_limit_ends_with_the_weights_of_enough_memory(family, tmp_path):
    plain = train(family, "plain", EXTRA_MB[family], tmp_path / "plain")
    assert plain.returncode != 0
    assert "can't allocate memory" in plain.stderr or "could not create" in plain.stderr

    limited = train(family, "split", EXTRA_MB[family], tmp_path / "limited")
    assert limited.returncode == 0, limited.stderr[-4000:]
    assert read_record(tmp_path / "limited")
    unlimited = train(family, "split", 0, tmp_path / "unlimited")
    assert unlimited.returncode == 0, unlimited.stderr[-4000:]
    assert not (tmp_path / "unlimited" / "memfit_oom.jsonl").exists()
    difference = relative_difference(weights(tmp_path / "limited"), weights(tmp_path / "unlimited"))
    print(f"{family}: relative difference of the weights {difference:.1e}")
    assert difference < LARGEST_DIFFERENCE[family]


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4])
