# Copyright (c) the d2_memfit developers.
"""Training on crowded photographs under a limit that the kernel enforces, in its own process."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.datasets import load_coco_json
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.modeling import build_model
from torch import Tensor

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.units import GB
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.memory import enforce_budget, is_out_of_memory, process_memory, return_large_blocks
from d2_memfit.techniques.registry import apply_techniques

from ..common import CONFIG, machine, sampled_data_bytes
from ..crowded import EndsOfIterations
from .step import FOR_MASK_RCNN, PACKED

PROJECT = Path(__file__).resolve().parents[3] / "projects" / "Transformers"
SIDES = ("enough memory", "Detectron2", "split", "technique")
ROOM = 0.75  # the limit's share of what training takes, beside what the process has at its start
# Objects in the first image of each iteration. The second image has the first of these numbers.
COUNTS = (20, 40, 60, 80, 100, 200, 300, 500, 1000, 1500)


class Job(NamedTuple):
    """A model that is trained.

    Attributes:
        config: a config file; "" is Detectron2's Mask R-CNN R50-FPN.
        opts: alternating keys and values.
        size: height and width of the images.
    """

    config: str
    opts: list[Any]
    size: int


SWIN = {
    "model_type": "swin",
    "depths": [2, 2, 2, 2],
    "drop_path_rate": 0.0,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
# No model has batch normalisation that is trained, so that images can run one by one.
JOBS = {
    # PIXEL_STD keeps activations of random weights small.
    "Mask R-CNN R50-FPN": Job(
        "",
        [
            *("INPUT.MASK_FORMAT", "bitmask", "MODEL.PIXEL_STD", [300.0] * 3),
            *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 128),
        ],
        384,
    ),
    "small Mask2Former": Job(
        "mask2former_swin_tiny",
        [
            "TRANSFORMERS.OPTIONS",
            [["backbone_config", SWIN], ["encoder_layers", 2], ["decoder_layers", 4]],
        ],
        320,
    ),
    "small RF-DETR with masks": Job("rf_detr_seg_coins", ["TRANSFORMERS.NUM_QUERIES", 100], 320),
}


def config_of(job: Job, size: int, has_techniques: bool) -> CfgNode:
    """The job's config.

    Args:
        has_techniques: whether they are on.
    """
    opts = ["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "MODEL.ROI_HEADS.NUM_CLASSES", 1, *job.opts]
    if not job.config:
        return load_cfg(CONFIG, opts + (FOR_MASK_RCNN if has_techniques else []))
    sys.path.insert(0, str(PROJECT))
    from d2_transformers import add_transformers_config

    opts += ["TRANSFORMERS.RESOLUTION", size]
    opts += PACKED if has_techniques else []
    file = PROJECT / "configs" / f"{job.config}.yaml"
    return load_cfg(str(file), opts, [add_transformers_config])


def batches(cfg: CfgNode, folder: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """A batch for each crowded image, with the first image of the dataset."""
    mapper = DatasetMapper(
        is_train=True,
        augmentations=[T.Resize((size, size))],
        image_format=cfg.INPUT.FORMAT,
        use_instance_mask=cfg.MODEL.MASK_ON,
        instance_mask_format=cfg.INPUT.MASK_FORMAT,
    )
    # With a dataset name, categories are numbered from 0.
    dicts = load_coco_json(str(folder / "crowds.json"), str(folder), "benchmark_crowds")
    for image in [*dicts, dicts[0]]:  # SimpleTrainer of Detectron2 main asks for one more
        yield [mapper(image), mapper(dicts[0])]


def train(
    name: str,
    side: str,
    folder: str,
    output_dir: str,
    iterations: int,
    budget_gb: Optional[float] = None,
    size: Optional[int] = None,
) -> dict[str, Any]:
    """Train one side; save its weights to OUTPUT_DIR/SIDE.pth.

    The first iteration is before the limit and the clock: it makes one-time allocations and, in
    d2_memfit, tests what the losses are divided by.

    Args:
        side: "enough memory" and "Detectron2" are Detectron2's trainer, without and with the limit.
            "split" recovers; "technique" uses the techniques and recovers.
        folder: of the crowded dataset.
        budget_gb: limit of the process's private memory.
        size: height and width of images in place of the job's.
    """
    return_large_blocks()
    job = JOBS[name]
    size = size or job.size
    torch.manual_seed(0)
    cfg = config_of(job, size, side == "technique")
    model = apply_techniques("model", build_model(cfg), cfg, announce=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    # AdamW would make steps of its full rate out of rounding.
    optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
    loader = batches(cfg, Path(folder), size)
    record = Path(output_dir) / side
    record.mkdir(parents=True)
    if side in ("enough memory", "Detectron2"):
        trainer = SimpleTrainer(model, loader, optimizer)
    else:
        options = RecoveryOptions(output_dir=str(record))
        trainer = AccumulatingTrainer(model, loader, optimizer, recovery=options)
    ends = EndsOfIterations()
    begin = BeginsAfterFirst(budget_gb)
    trainer.register_hooks([ends, begin])
    error = ""
    with sampled_data_bytes() as samples:
        try:
            trainer.train(0, iterations)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            error = " ".join(str(e).replace(f"{folder}/", "").split())[:200]
    seconds = time.process_time() - begin.cpu_s
    enforce_budget(None, "cpu")
    torch.save((before, model.state_dict()), Path(output_dir) / f"{side}.pth")
    events = record / "memfit_oom.jsonl"
    return {
        "model": name,
        "machine": machine(),
        "budget_gb": budget_gb,
        "start_gb": begin.start_gb,
        "iterations": len(ends.ends),
        "seconds": seconds,
        "peak_gb": max(size for now, size in samples if now > ends.ends[0]) / GB,
        "events": len(events.read_text().splitlines()) if events.exists() else 0,
        "error": error,
    }


class BeginsAfterFirst(HookBase):
    """Sets the limit after the first iteration.

    Attributes:
        start_gb: the process's private memory at that time, without gradients.
        cpu_s: the process's CPU time at that time.
    """

    def __init__(self, budget_gb: Optional[float]) -> None:
        self._budget_gb = budget_gb

    def after_step(self) -> None:
        if self.trainer.iter == 0:
            self.trainer.optimizer.zero_grad(set_to_none=True)
            self.start_gb = process_memory().data_bytes / GB
            enforce_budget(self._budget_gb, "cpu")
            torch.manual_seed(1)
            self.cpu_s = time.process_time()


def difference(output_dir: Path, side: str) -> float:
    """Norm of the difference of the final weights to those with enough memory.

    It is relative to the norm of what training has changed.
    """
    before, expected = torch.load(output_dir / f"{SIDES[0]}.pth", weights_only=True)
    _, actual = torch.load(output_dir / f"{side}.pth", weights_only=True)

    def flat(weights: dict[str, Tensor]) -> Tensor:
        return torch.cat([weights[key].double().flatten() for key in before])

    change = (flat(expected) - flat(before)).norm()
    return float((flat(actual) - flat(expected)).norm() / change)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(train(**json.loads(sys.argv[2]))))
