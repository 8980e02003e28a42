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
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from torch import Tensor

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.units import GB
from d2_memfit.config import load_cfg
from d2_memfit.memory import enforce_budget, is_out_of_memory, process_memory, return_large_blocks
from d2_memfit.settings import RecoveryOptions
from d2_memfit.techniques import apply_techniques

from ..common import CONFIG, machine, sampled_data_bytes
from ..crowded import EndsOfIterations
from .step import CHUNKED_CRITERION, FOR_MASK_RCNN

PROJECT = Path(__file__).resolve().parents[3] / "projects" / "Transformers"
SIDES = ("enough memory", "Detectron2", "split", "technique")
# Objects in the first image of each iteration. The second image has the first of these numbers.
COUNTS = (20, 40, 60, 80, 100, 200, 300, 500, 1000, 1500)


class Job(NamedTuple):
    """A model that is trained.

    Attributes:
        config: a config file; "" is Detectron2's Mask R-CNN R50-FPN.
        opts: alternating keys and values.
        size: height and width of the images.
        extra_gb: room for training in addition to the process's memory before.
    """

    config: str
    opts: list[Any]
    size: int
    extra_gb: float


def of_transformers(config: str, size: int, extra_gb: float, *opts: Any) -> Job:
    return Job(config, [*opts, "TRANSFORMERS.RESOLUTION", size], size, extra_gb)


# PIXEL_STD keeps activations of random weights small.
JOBS = {
    "Mask R-CNN R50-FPN": Job(
        "",
        ["INPUT.MASK_FORMAT", "bitmask", "MODEL.PIXEL_STD", [300.0] * 3],
        384,
        1.2,
    ),
    "Mask2Former R50": of_transformers(
        "mask2former_r50",
        *(384, 1.6, "TRANSFORMERS.OPTIONS", [["encoder_layers", 2], ["decoder_layers", 4]]),
    ),
    "RF-DETR with masks": of_transformers(
        "rf_detr_seg_coins", 320, 1.2, "TRANSFORMERS.NUM_QUERIES", 100
    ),
    "RT-DETR v2": of_transformers("rt_detr_v2_coins", 320, 0.8, "TRANSFORMERS.NUM_QUERIES", 100),
}


def config_of(job: Job, technique: Optional[int]) -> CfgNode:
    """The job's config.

    Args:
        technique: MEMFIT.CRITERION.CHUNK_SIZE; None is without the techniques.
    """
    common = ["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "MODEL.ROI_HEADS.NUM_CLASSES", 1]
    if not job.config:
        keys = [] if technique is None else FOR_MASK_RCNN
        return load_cfg(CONFIG, [*common, *job.opts, *keys])
    sys.path.insert(0, str(PROJECT))
    from d2_transformers import add_transformers_config

    keys = [] if technique is None else [*CHUNKED_CRITERION, technique]
    file = PROJECT / "configs" / f"{job.config}.yaml"
    return load_cfg(str(file), [*common, *job.opts, *keys], [add_transformers_config])


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
    chunk_size: int,
    iterations: int,
    size: Optional[int] = None,
) -> dict[str, Any]:
    """Train one side; save its weights to OUTPUT_DIR/SIDE.pth.

    Args:
        side: "enough memory" and "Detectron2" are Detectron2's trainer, without and with the limit.
            "split" recovers; "technique" uses the techniques and recovers.
        folder: of the crowded dataset.
        size: in place of the job's.
    """
    return_large_blocks()
    job = JOBS[name]
    size = size or job.size
    torch.manual_seed(0)
    cfg = config_of(job, chunk_size if side == "technique" else None)
    if job.config:
        cfg.TRANSFORMERS.RESOLUTION = size
    model = apply_techniques("model", build_model(cfg), cfg, announce=False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    # AdamW would make steps of its full rate out of rounding.
    optimizer = torch.optim.SGD(trained, lr=1e-4, momentum=0.9)
    # One-time allocations of the process come before the limit.
    SimpleTrainer(model, batches(cfg, Path(folder), size), optimizer).train(0, 1)
    optimizer.zero_grad(set_to_none=True)
    budget_gb = process_memory().data_bytes / GB + job.extra_gb
    record = Path(output_dir) / side
    record.mkdir(parents=True)
    loader = batches(cfg, Path(folder), size)
    if side in ("enough memory", "Detectron2"):
        trainer = SimpleTrainer(model, loader, optimizer)
    else:
        options = RecoveryOptions(output_dir=str(record))
        trainer = AccumulatingTrainer(model, loader, optimizer, recovery=options)
    ends = EndsOfIterations()
    trainer.register_hooks([ends])
    if side != "enough memory":
        enforce_budget(budget_gb, "cpu")
    error = ""
    start = time.process_time()
    with sampled_data_bytes() as samples:
        try:
            trainer.train(0, iterations)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            error = " ".join(str(e).split())[:200]
    seconds = time.process_time() - start
    if side != "enough memory":
        enforce_budget(None, "cpu")
    after = model.state_dict()
    torch.save((before, after), Path(output_dir) / f"{side}.pth")
    events = record / "memfit_oom.jsonl"
    return {
        "model": name,
        "machine": machine(),
        "iterations": len(ends.ends),
        "seconds": seconds,
        "peak_gb": max(num_bytes for _, num_bytes in samples) / GB,
        "budget_gb": None if side == "enough memory" else budget_gb,
        "events": len(events.read_text().splitlines()) if events.exists() else 0,
        "error": error,
    }


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
