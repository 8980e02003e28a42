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


def train(dataset: Path, output_dir: Path, opts: list[str]) -> None:
    command = [sys.executable, ROOT / "tools" / "train_net.py", "--config-file", CONFIG]
    for split in ("train", "val"):
        command += ["--coco", f"coins_{split}", dataset / f"{split}.json", dataset / split]
    command += ["OUTPUT_DIR", output_dir, *opts]
    subprocess.run([str(c) for c in command], check=True)


def predict(dataset: Path, output_dir: Path, found: Path) -> None:
    """Find coins in the validation images with the trained model."""
    command = [sys.executable, "-m", "d2_memfit", "predict", "--overwrite", "--output", found]
    command += ["--config-file", output_dir / "config.yaml"]
    command += ["--coco", "coins_val", dataset / "val.json", dataset / "val"]
    subprocess.run([str(c) for c in command], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("output/coins"))
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="KEY VALUE pairs for train_net.py")
    args = parser.parse_args()
    output_dir = args.output_dir
    dataset = output_dir / "dataset"

    if not (dataset / "val.json").exists():  # which is written last
        make_dataset(dataset)
    train(dataset, output_dir, args.opts)
    found = output_dir / "predicted"
    predict(dataset, output_dir, found)

    lines = [json.loads(line) for line in (output_dir / "metrics.json").open()]
    ap50 = {k: next(m[k] for m in reversed(lines) if k in m) for k in ("bbox/AP50", "segm/AP50")}
    print(f"\nOn the validation images: box AP50 {ap50['bbox/AP50']:.1f}", end=", ")
    print(f"mask AP50 {ap50['segm/AP50']:.1f}")
    print(f"  dataset      {dataset}")
    print(f"  predictions  {found / 'pictures'}, in images of coins that it was not trained on,")
    print("               and in COCO's format beside it")
    print(f"  metrics      {output_dir / 'metrics.json'}")
    print(f"  TensorBoard  tensorboard --logdir {output_dir}")


if __name__ == "__main__":
    main()
