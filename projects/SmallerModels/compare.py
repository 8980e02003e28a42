# Copyright (c) the d2_memfit developers.
"""AP, bytes of the weights and time of an image, of several models on one dataset.

    python projects/SmallerModels/compare.py \
        --coco my_val val.json images/ --results results.jsonl \
        --model full d2_memfit.cli.train:Trainer output/config.yaml output/model_final.pth \
        --model int8 quantize:Trainer output/config.yaml output/model_int8.pth

Times are CPU seconds on one thread. The models get each image in turn, so that other load on the
machine is the same for all.
"""

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper
from torch import nn

from d2_memfit.cli.command_line import add_coco_option
from d2_memfit.common.files import check_outputs
from d2_memfit.config import load_cfg
from d2_memfit.data import register_coco
from d2_memfit.errors import exit_on_error
from d2_memfit.inference import load_whole_model
from d2_memfit.job import find_function

_ROUNDS = 1


def megabytes(model: nn.Module) -> float:
    """Size of a file with the model's weights."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict()}, file)
    return file.tell() / 2**20


def seconds_of(models: Sequence[nn.Module], images: Sequence[Any]) -> list[float]:
    """Median CPU seconds of an image, for each model."""
    seconds: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for image in images:
                for model, times in zip(models, seconds):
                    began = time.process_time()
                    model([image])
                    times.append(time.process_time() - began)
    return [statistics.median(times) for times in seconds]


def load(trainer: str, config: str, weights: str, dataset: str) -> tuple[Any, CfgNode, nn.Module]:
    """The trainer, the config and the model with its weights."""
    kind: Any = find_function(trainer, "--model")
    opts = ["MODEL.DEVICE", "cpu", "DATASETS.TEST", f"('{dataset}',)"]
    cfg = load_cfg(config, opts)
    model = kind.build_model(cfg).eval()
    load_whole_model(model, weights)
    return kind, cfg, model


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model",
        nargs=4,
        action="append",
        required=True,
        metavar=("NAME", "TRAINER", "CONFIG", "WEIGHTS"),
    )
    parser.add_argument("--results", type=Path, required=True, help="file to which lines are added")
    add_coco_option(parser)
    args = parser.parse_args()
    ((dataset, json_file, image_dir),) = args.coco
    inputs = [json_file, *(file for _, _, *files in args.model for file in files)]
    check_outputs([args.results], inputs, os.path.exists)  # lines are added
    register_coco(dataset, json_file, image_dir)
    torch.set_num_threads(1)
    loaded = [load(trainer, file, weights, dataset) for _, trainer, file, weights in args.model]
    mapper = DatasetMapper(loaded[0][1], is_train=False)
    images = [mapper(image) for image in DatasetCatalog.get(dataset)]
    times = seconds_of([model for *_, model in loaded], images)
    with args.results.open("a") as file:
        for (name, *_), (kind, cfg, model), seconds in zip(args.model, loaded, times):
            row: dict[str, Any] = {
                "dataset": dataset,
                "model": name,
                "megabytes": round(megabytes(model), 2),
            }
            row["cpu_seconds_per_image"] = round(seconds, 4)
            for task, values in kind.test(cfg, model).items():
                for key in ("AP", "AP50"):
                    # Without any prediction Detectron2 has no number.
                    row[f"{task}/{key}"] = round(np.nan_to_num(values[key]).item(), 1)
            file.write(json.dumps(row) + "\n")
            print(row)


if __name__ == "__main__":
    main()
