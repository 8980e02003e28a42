"""Make the Coins dataset, train on it with gradient accumulation, evaluate, and draw the result.

    python projects/Coins/demo.py --output-dir output/coins [KEY VALUE ...]

It calls ``tools/train_net.py`` as a user would; KEY VALUE pairs are handed on to it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
from detectron2.data.catalog import Metadata
from detectron2.engine import DefaultPredictor
from detectron2.utils.visualizer import Visualizer
from make_dataset import make_dataset

from d2_memfit.config import load_cfg

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "projects" / "Coins" / "configs" / "mask_rcnn_coins.yaml"
NUM_PICTURES = 6
MIN_SCORE = 0.7


def train(dataset: Path, output_dir: Path, opts: list[str]) -> None:
    command = [sys.executable, ROOT / "tools" / "train_net.py", "--config-file", CONFIG]
    for split in ("train", "val"):
        command += ["--coco", f"coins_{split}", dataset / f"{split}.json", dataset / split]
    command += ["OUTPUT_DIR", output_dir, *opts]
    subprocess.run([str(c) for c in command], check=True)


def draw_predictions(dataset: Path, output_dir: Path) -> Path:
    """Draw what the trained model finds on the first validation images, one beside the other."""
    opts = ["MODEL.WEIGHTS", str(output_dir / "model_final.pth")]
    predictor = DefaultPredictor(load_cfg(str(output_dir / "config.yaml"), opts))
    classes = Metadata(thing_classes=["coin"])
    pictures = []
    for file in sorted((dataset / "val").glob("*.png"))[:NUM_PICTURES]:
        image = cv2.imread(str(file))
        found = predictor(image)["instances"].to("cpu")
        drawing = Visualizer(image[:, :, ::-1], classes, scale=2).draw_instance_predictions(
            found[found.scores > MIN_SCORE]
        )
        pictures.append(drawing.get_image()[:, :, ::-1])
    cell = np.max([p.shape for p in pictures], axis=0)
    padded = [np.pad(p, [(0, c - s) for c, s in zip(cell, p.shape)]) for p in pictures]
    rows = [np.hstack(padded[i : i + 2]) for i in range(0, NUM_PICTURES, 2)]
    target = output_dir / "predictions.png"
    cv2.imwrite(str(target), np.vstack(rows))
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("output/coins"))
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="KEY VALUE pairs for train_net.py")
    args = parser.parse_args()
    output_dir = args.output_dir
    dataset = output_dir / "dataset"

    make_dataset(dataset)
    train(dataset, output_dir, args.opts)
    picture = draw_predictions(dataset, output_dir)

    lines = [json.loads(line) for line in (output_dir / "metrics.json").open()]
    ap50 = {k: next(m[k] for m in reversed(lines) if k in m) for k in ("bbox/AP50", "segm/AP50")}
    print(f"\nOn the validation images: box AP50 {ap50['bbox/AP50']:.1f}", end=", ")
    print(f"mask AP50 {ap50['segm/AP50']:.1f}")
    print(f"  dataset      {dataset}")
    print(f"  predictions  {picture}")
    print(f"  metrics      {output_dir / 'metrics.json'}")
    print(f"  TensorBoard  tensorboard --logdir {output_dir}")


if __name__ == "__main__":
    main()
