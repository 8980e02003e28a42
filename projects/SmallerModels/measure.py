# Copyright (c) the d2_memfit developers.
"""Make the table of README.md: train, shrink and compare the models on one dataset.

    python projects/SmallerModels/measure.py coins --output-dir output/smaller
    python projects/SmallerModels/measure.py digits --output-dir output/smaller

What is there already is kept. The rows are added to ``results.jsonl`` beside this script.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECTS = HERE.parent
TRAIN = PROJECTS.parent / "tools" / "train_net.py"
DISTIL = PROJECTS / "Distillation" / "train_distillation.py"
PLAIN = "d2_memfit.cli.train:Trainer"
# Fine-tuning after pruning: a sixth of the iterations, half the learning rate.
FINE_TUNE = {
    "coins": ["SOLVER.MAX_ITER", "20", "SOLVER.STEPS", "(15,)"],
    "digits": ["SOLVER.MAX_ITER", "60", "SOLVER.STEPS", "(45,)"],
}
SLOWER = ["SOLVER.BASE_LR", "0.01", "SOLVER.WARMUP_ITERS", "5"]


def run(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], check=True)


def measure(name: str, folder: Path) -> None:
    dataset = folder / name
    maker = {"coins": PROJECTS / "Coins" / "make_dataset.py", "digits": HERE / "make_digits.py"}
    if not dataset.exists():
        run(maker[name], dataset)
    train, val = (
        ["--coco", f"{name}_{split}", dataset / f"{split}.json", dataset / split]
        for split in ("train", "val")
    )
    configs = {
        size: HERE / "configs" / f"{name}_{size}.yaml" for size in ("resnet18", "shufflenet")
    }
    outputs = {
        part: folder / f"{name}_{part}"
        for part in ("resnet18", "shufflenet", "distilled", "pruned")
    }
    full, small, pruned = (outputs[part] for part in ("resnet18", "shufflenet", "pruned"))
    teacher = ["DISTILLATION.TEACHER_CONFIG", full / "config.yaml"]
    teacher += ["DISTILLATION.TEACHER_WEIGHTS", full / "model_final.pth"]
    trainings: dict[str, tuple[Path, Path, list[Any]]] = {
        "resnet18": (TRAIN, configs["resnet18"], []),
        "shufflenet": (TRAIN, configs["shufflenet"], []),
        "distilled": (DISTIL, configs["shufflenet"], teacher),
        "pruned": (HERE / "prune.py", full / "config.yaml", [*FINE_TUNE[name], *SLOWER]),
    }
    for part, (script, config, opts) in trainings.items():
        if not (outputs[part] / "model_final.pth").exists():
            data = [*train, *val, "OUTPUT_DIR", outputs[part], *opts]
            run(script, "--config-file", config, *data)
    for output in (full, small, pruned):
        opts = ["--trainer", "prune:Trainer"] if output is pruned else []
        command = ["--config-file", output / "config.yaml", *opts, *train]
        run(HERE / "quantize.py", *command, "--output", output / "model_int8.pth")
    models = [
        ("ResNet-18", PLAIN, full, "model_final.pth"),
        ("ResNet-18, int8", "quantize:Trainer", full, "model_int8.pth"),
        ("ResNet-18, pruned, not yet trained", "prune:Trainer", pruned, "pruned.pth"),
        ("ResNet-18, pruned", "prune:Trainer", pruned, "model_final.pth"),
        ("ResNet-18, pruned, int8", "quantize:PrunedTrainer", pruned, "model_int8.pth"),
        ("ShuffleNetV2", PLAIN, small, "model_final.pth"),
        ("ShuffleNetV2, int8", "quantize:Trainer", small, "model_int8.pth"),
        ("ShuffleNetV2, distilled", PLAIN, outputs["distilled"], "model_final.pth"),
    ]
    options: list[object] = []
    for model, trainer, output, weights in models:
        # The distilled student is an ordinary model of its config.
        config = small if output is outputs["distilled"] else output
        options += ["--model", model, trainer, config / "config.yaml", output / weights]
    run(HERE / "compare.py", *val, "--results", HERE / "results.jsonl", *options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset", choices=("coins", "digits"))
    parser.add_argument("--output-dir", type=Path, default=Path("output/smaller"))
    args = parser.parse_args()
    measure(args.dataset, args.output_dir)
