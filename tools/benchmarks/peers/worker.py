# Copyright (c) the d2_memfit developers.
"""One side trains in its own process, under a limit on its memory if it has one.

    python -m benchmarks.peers.worker SPEC

SPEC is JSON: ``side``; ``sizes``, the height and width of each image, for each rank;
``batch_size`` and ``steps``; ``extra_gb``, the room in addition to the process's memory before
training, or null; ``folder``, which gets ``journal.RANK.jsonl``. Under torchrun each
rank is one such process.
"""

import gc
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from torch import nn
from torch.optim import Optimizer

from d2_memfit.common import GB
from d2_memfit.config.load import load_cfg
from d2_memfit.memory import enforce_budget, process_memory, return_large_blocks
from d2_memfit.techniques.registry import apply_techniques

from ..common import CONFIG, coins, sampled_data_bytes
from ..training import SMALL_ACTIVATIONS, exact_techniques_of_one_rank, settings
from .sides import SIDES, Job

THUMBNAIL = (128, 160)
# Few proposals, so that memory and time are those of the image.
FEW_PROPOSALS = ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 32, "MODEL.RPN.POST_NMS_TOPK_TRAIN", 100)


class Worker:
    """Builds the model, gives the images, and notes the images of each optimizer step."""

    def __init__(self, spec: dict[str, Any], stack: ExitStack) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self.spec = spec
        self.folder = Path(spec["folder"])
        self.sizes = [tuple(size) for size in spec["sizes"][rank]]
        self.sources = {s: stack.enter_context(coins(*s)) for s in {*self.sizes, THUMBNAIL}}
        self.journal = (self.folder / f"journal.{rank}.jsonl").open("w")
        self.ready: list[tuple[nn.Module, Optimizer]] = []
        self.done: set[int] = set()  # images whose backward has ended since the last step

    def note(self, **line: Any) -> None:
        self.journal.write(json.dumps(line) + "\n")
        self.journal.flush()  # what is written stays if the process is killed

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:  # the pass starts, perhaps again
            self.done.clear()
            self.note(event="begin")
        return {**self.photograph(self.sizes[index], index), "image_id": index}

    def photograph(self, size: tuple[int, ...], index: int) -> dict[str, Any]:
        dicts, mapper = self.sources[size]
        return dict(mapper(dicts[index % len(dicts)]))

    def build(self) -> tuple[nn.Module, Optimizer]:
        """Make a Mask R-CNN R50-FPN with fixed random weights, and SGD with its momentum."""
        exact = exact_techniques_of_one_rank() if "exact techniques" in self.spec["side"] else []
        cfg = load_cfg(CONFIG, [*SMALL_ACTIVATIONS, *FEW_PROPOSALS, *settings(exact)])
        cfg.MODEL.DEVICE = "cpu"
        torch.manual_seed(0)
        model = apply_techniques("model", build_model(cfg), cfg)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
        optimizer = apply_techniques("optimizer", optimizer, cfg)
        with EventStorage():
            sum(model([self.photograph(THUMBNAIL, 0)]).values()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.register_forward_hook(self.after_forward)
        optimizer.register_step_post_hook(self.after_step)
        torch.manual_seed(0)
        return model, optimizer

    def first_then_new(self) -> tuple[nn.Module, Optimizer]:
        return self.ready.pop() if self.ready else self.build()

    def after_forward(self, model: nn.Module, args: Any, losses: dict[str, torch.Tensor]) -> None:
        images = [image["image_id"] for image in args[0]]
        engine = torch.autograd.Variable._execution_engine

        def backward_begins(gradient: torch.Tensor) -> None:
            engine.queue_callback(lambda: self.done.update(images))  # called if it ends

        loss = next(iter(losses.values()))
        if loss.requires_grad:  # not in the test of d2_memfit's before the first window
            loss.register_hook(backward_begins)

    def after_step(self, *_: Any) -> None:
        self.note(event="step", images=sorted(self.done))
        self.done.clear()

    def train(self) -> None:
        return_large_blocks()
        function, arguments = SIDES[self.spec["side"]]
        cut = (self.spec["batch_size"], self.spec["steps"])
        job = Job(self.first_then_new, self, *cut, self.folder)  # type: ignore[arg-type]
        model, optimizer = self.build()  # what a process allocates once is there before the limit
        trained_gb = sum(p.nbytes for p in model.parameters() if p.requires_grad) / GB
        self.ready.append((model, optimizer))
        del model, optimizer
        gc.collect()
        before_gb = process_memory().data_bytes / GB
        with EventStorage(), ExitStack() as stack:
            if self.spec["extra_gb"] is not None:
                enforce_budget(before_gb + self.spec["extra_gb"], "cpu")
                samples = [(0.0, 0)]
            else:
                samples = stack.enter_context(sampled_data_bytes())
            function(job, **arguments)
        peak_gb = max(num_bytes for _, num_bytes in samples) / GB
        self.note(event="end", extra_gb=peak_gb - before_gb, trained_gb=trained_gb)


if __name__ == "__main__":
    with ExitStack() as stack:
        Worker(json.loads(sys.argv[1]), stack).train()
