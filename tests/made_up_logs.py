# Copyright (c) the d2_memfit developers.
"""Made-up logs in the shapes in which Detectron2 and consoles write them."""

import json

import yaml
from tiny import tiny_cfg

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total "
    "capacity of 10.00 GiB of which 512.00 MiB is free. Process 71 has 1.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 8.50 GiB memory in use. Of the allocated "
    "memory 7.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)
ENVIRONMENT = """Environment info:
----------------------  ----------------------------------------
sys.platform            linux
Python                  3.8.10 (default, Mar 15 2022) [GCC 9.4.0]
detectron2              0.6 @/made/up/detectron2
PyTorch                 1.13.1+cu117 @/made/up/torch
GPU available           Yes
GPU 0,1                 Made Up GPU 9000 (arch=8.6)
Driver version          470.10
----------------------  ----------------------------------------
PyTorch built with:
  - CUDA Runtime 11.7
  - CuDNN 8.5  (built against CUDA 11.8)"""
CONFIG = """Running with full config:
MODEL:
  META_ARCHITECTURE: GeneralizedRCNN
  PIXEL_MEAN: [103.53, 116.28, 123.675]
SOLVER:
  IMS_PER_BATCH: 4
  MAX_ITER: 100
"""
DATA = [
    "Removed 2 images with no usable annotations. 28 images left.",
    """Distribution of instances among all 2 categories:
|  category  | #instances   |  category  | #instances   |
|:----------:|:-------------|:----------:|:-------------|
|    cup     | 30           |   plate    | 12           |
|            |              |            |              |
|   total    | 42           |            |              |""",
    "[DatasetMapper] Augmentations used in training: [ResizeShortestEdge(800), RandomFlip()]",
    "Serializing 28 elements to byte tensors and concatenating them all ...",
]
TRACEBACK = """Exception during training:
Traceback (most recent call last):
  File "/made/up/train_loop.py", line 149, in train
    self.run_step()
"""


def progress(iteration, peak=3000):
    return (
        f" eta: 0:01:00  iter: {iteration}  total_loss: 1.25  loss_cls: 0.75  time: 0.2500  "
        f"data_time: 0.0100  lr: 0.001  max_mem: {peak}M"
    )


def headed(messages, style="file"):
    """A log of messages: of a file, or of a console with colours."""
    texts = []
    for number, message in enumerate(messages):
        date = f"01/02 03:{number // 60:02d}:{number % 60:02d}"
        if style == "file":
            texts.append(f"[{date}] d2.engine.defaults INFO: {message}\n")
        else:
            texts.append(f"\x1b[32m[{date} d2.engine.defaults]: \x1b[0m{message}\n")
    text = "".join(texts)
    return text.replace("\x1b", "") if style == "pasted" else text  # some editors lose it


def log(*end, iterations=(19, 39), config=CONFIG):
    """The messages of a run that trains."""
    return [
        "Rank of current process: 0. World size: 2",
        ENVIRONMENT,
        "Command line arguments: Namespace(config_file='made/up.yaml', num_gpus=2, opts=[])",
        config,
        "Model:\nGeneralizedRCNN(\n  (backbone): FPN()\n)",
        *DATA,
        "Starting training from iteration 0",
        *map(progress, iterations),
        *end,
    ]


def notebook(*cells):
    """A notebook's JSON, of pairs of code and what it prints; a list is an error's traceback."""
    made = []
    for code, printed in cells:
        output = {"output_type": "stream", "text": [printed]}
        if isinstance(printed, list):
            output = {"output_type": "error", "traceback": printed}
        made.append({"cell_type": "code", "source": code.splitlines(True), "outputs": [output]})
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "made up"}, *made]})


def config_text(**keys):
    """The full config of a tiny detector as plain Detectron2 logs it, with other values.

    Args:
        keys: by name, such as ``SOLVER__IMS_PER_BATCH``; others than Detectron2's, too.
    """
    cfg = tiny_cfg("faster_rcnn", fpn=False)
    cfg.DATASETS.TRAIN, cfg.SOLVER.IMS_PER_BATCH = ("of_a_stranger",), 4
    values = yaml.safe_load(cfg.dump())
    del values["MEMFIT"], values["SOLVER"]["ACCUMULATION_STEPS"]
    for key, value in keys.items():
        *path, name = key.split("__")
        node = values
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return yaml.safe_dump(values)
