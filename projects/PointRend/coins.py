# Copyright (c) the d2_memfit developers.
"""Train PointRend on photographs of coins, on a CPU: train_net.py with that dataset.

python projects/PointRend/coins.py --output-dir output/pointrend [KEY VALUE ...]
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import train_net
from detectron2.engine import default_argument_parser

from d2_memfit.cli.next_step import after_training
from d2_memfit.compat import has_compiled_ops
from d2_memfit.data import register_coco

PROJECTS = Path(__file__).resolve().parents[1]
sys.path.append(str(PROJECTS / "Coins"))

from make_dataset import make_dataset  # noqa: E402

CONFIG = PROJECTS / "PointRend" / "configs" / "pointrend_coins.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", default="output/pointrend")
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="KEY VALUE pairs for train_net.py")
    args = parser.parse_args()
    dataset = Path(args.output_dir) / "dataset"
    make_dataset(dataset)
    for split in ("train", "val"):
        register_coco(f"coins_{split}", str(dataset / f"{split}.json"), str(dataset / split))
    # The project's evaluator is the fast one, which needs Detectron2's compiled operators.
    fast = has_compiled_ops()
    train_net.COCOEvaluator = partial(train_net.COCOEvaluator, use_fast_impl=fast)  # type: ignore[attr-defined]
    command = ["--config-file", str(CONFIG), "OUTPUT_DIR", args.output_dir, *args.opts]
    train_net.main(default_argument_parser().parse_args(command))
    weights = f"{args.output_dir}/model_final.pth"
    keys = [train_net.add_pointrend_config]
    print(after_training(args.output_dir, [], weights, train_net.Trainer, keys))


if __name__ == "__main__":
    main()
