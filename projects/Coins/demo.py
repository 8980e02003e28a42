# Copyright (c) the d2_memfit developers.
"""Make the Coins dataset, train on it with gradient accumulation, evaluate, and use the model.

    python projects/Coins/demo.py --output-dir output/coins [KEY VALUE ...]

It calls ``tools/train_net.py`` as a user would, with the KEY VALUE pairs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from make_dataset import make_dataset

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "projects" / "Coins" / "configs" / "mask_rcnn_coins.yaml"


def run(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("output/coins"))
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="KEY VALUE pairs for train_net.py")
    args = parser.parse_args()
    folder, dataset = args.output_dir, args.output_dir / "dataset"
    make_dataset(dataset)
    train, val = (
        ("--coco", f"coins_{split}", dataset / f"{split}.json", dataset / split)
        for split in ("train", "val")
    )
    script = ROOT / "tools" / "train_net.py"
    run(script, "--config-file", CONFIG, *train, *val, "OUTPUT_DIR", folder, *args.opts)
    config, found = folder / "config.yaml", folder / "predicted"
    to = ("--overwrite", "--output", found, "--config-file", config)
    run("-m", "d2_memfit", "predict", *to, *val)
    lines = [json.loads(line) for line in (folder / "metrics.json").open()]
    box, mask = (
        next(line[name] for line in reversed(lines) if name in line)
        for name in ("bbox/AP50", "segm/AP50")
    )
    print(f"\nOn the validation images: box AP50 {box:.1f}, mask AP50 {mask:.1f}")
    print(f"  pictures     {found / 'pictures'}")
    print(f"  TensorBoard  tensorboard --logdir {folder}")


if __name__ == "__main__":
    main()
