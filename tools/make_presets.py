#!/usr/bin/env python3
"""Write the presets in configs/, and docs/MEMORY_ZOO.md, from plans.

    tools/make_presets.py [NAME ...]        such as COCO-Detection/retinanet_R_50_FPN_3x
    tools/make_presets.py --transformers [NAME ...]                     such as rf_detr_nano

For each model and each card that it makes sense on, the plan of one GPU: the recipe's 16 images in
each iteration, with exact techniques and mixed precision. A few minutes on two cores for all of the
zoo. Those of projects/Transformers are made with --transformers, and take some minutes each.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from d2_memfit.config import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner import Plan, Planner
from d2_memfit.planner.device_model import DeviceModel
from d2_memfit.presets import budget_of_preset

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
TIERS = ["exact", "precision"]  # the second only where the first does not do

# By the size of the backbone: below it does not fit or is all that fits, above a larger one does.
CARDS = {
    "R_18": ("4GB", "6GB"),
    "R_50": ("4GB", "6GB", "8GB", "12GB", "16GB"),
    "R_101": ("4GB", "6GB", "8GB", "12GB", "16GB", "24GB"),
    "X_101": ("6GB", "8GB", "12GB", "16GB", "24GB"),
}

MODELS = (
    "COCO-Detection/faster_rcnn_R_18_FPN_3x",
    "COCO-Detection/faster_rcnn_R_50_FPN_3x",
    "COCO-Detection/faster_rcnn_R_101_FPN_3x",
    "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x",
    "COCO-Detection/retinanet_R_18_FPN_3x",
    "COCO-Detection/retinanet_R_50_FPN_3x",
    "COCO-Detection/retinanet_R_101_FPN_3x",
    "COCO-InstanceSegmentation/mask_rcnn_R_18_FPN_3x",
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",
    "COCO-InstanceSegmentation/mask_rcnn_R_101_FPN_3x",
    "COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x",
    "COCO-InstanceSegmentation/cascade_mask_rcnn_R_50_FPN_3x",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
    "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
    "COCO-PanopticSegmentation/panoptic_fpn_R_101_3x",
)


TRANSFORMERS = ROOT / "projects" / "Transformers"
ALL_CARDS = ("4GB", "6GB", "8GB", "12GB", "16GB", "24GB")
MODELS_OF_TRANSFORMERS = (
    *(f"rf_detr_{size}" for size in ("nano", "small", "base", "medium", "large")),
    *(f"rf_detr_seg_{size}" for size in ("nano", "small", "base", "medium", "large")),
    *(f"rt_detr_v2_{size}" for size in ("r18", "r34", "r50", "r101")),
    *(f"mask2former_{size}" for size in ("r50", "swin_tiny", "swin_small")),
)


def zoo_job(model: str) -> Job:
    return Job.from_cfg(load_cfg(str(CONFIGS / f"{model}.yaml")), 1)


def transformers_job(model: str) -> Job:
    sys.path.insert(0, str(TRANSFORMERS))
    from d2_transformers import Trainer, add_transformers_config

    file = TRANSFORMERS / "configs" / f"{model}.yaml"
    return Job.from_trainer(Trainer, load_cfg(str(file), (), [add_transformers_config]), 1)


def presets(job: Job, cards: Sequence[str], file: str) -> Iterator[tuple[str, Plan]]:
    """Plans of those cards that the model fits on with other settings than on the card before, and
    of those that have a preset already: a name that is in use stays.

    None that would need bitsandbytes, which not everybody has.

    Args:
        file: of a preset, with "{}" for its card.
    """
    planner = Planner(job, DeviceModel.load("cuda"))
    before = None
    for card in cards:
        plan = planner.plan(budget_of_preset(card), TIERS[:1])
        if not plan.fits:
            plan = planner.plan(budget_of_preset(card), TIERS)
        settings = {k: v for k, v in plan.settings.items() if k != "MEMFIT.BUDGET_GB"}
        is_new = settings != before or Path(file.format(card)).exists()
        if plan.fits and is_new and "MEMFIT.OPTIMIZER.STATES_8BIT" not in settings:
            before = settings
            yield card, plan


def preset_text(model: str, card: str, plan: Plan) -> str:
    estimate = plan.estimate
    images = estimate.images_per_gpu * estimate.accumulation_steps
    lines = [
        f"# {Path(model).name} on one GPU of {card}: {images} images in each "
        f"iteration, as in the recipe,",
        f"# {estimate.images_per_micro_batch} at a time. Estimated at "
        f"{estimate.device_total_gb:.1f} of {plan.budget_gb:g} GB.",
        "# Written by tools/make_presets.py.",
        f'_BASE_: "{Path(model).name}.yaml"',
    ]
    tree: dict[str, Any] = {}
    settings = {**plan.settings, "MEMFIT.PRESET": card}
    del settings["MEMFIT.BUDGET_GB"]
    for key, value in sorted(settings.items()):
        *nodes, name = key.split(".")
        node = tree
        for part in nodes:
            node = node.setdefault(part, {})
        node[name] = value
    return "\n".join([*lines, *_yaml_lines(tree), ""])


def _yaml_lines(tree: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            text = f'"{value}"' if isinstance(value, str) else value
            yield f"{indent}{key}: {text}"


def preset_row(model: str, card: str, plan: Plan) -> list[str]:
    estimate = plan.estimate
    tiers = sorted({s.tier for s in plan.steps})
    techniques = [s.name for s in plan.steps if s.name != "smaller micro-batches"]
    windows = estimate.images_per_gpu * estimate.accumulation_steps
    steps = -(-windows // estimate.images_per_micro_batch)
    return [
        f"{model}_{card}.yaml",
        ", ".join(tiers) or "none",
        ", ".join(techniques) or "none",
        f"{estimate.images_per_micro_batch} x {steps}",
        f"{estimate.device_total_gb:.2f} of {plan.budget_gb:g}",
        "not yet",
        f"{plan.time_factor:.2f}",
    ]


HEADER = ["config", "tiers", "techniques", "images x steps", "estimated GB", "measured", "time x"]

INTRODUCTION = """# Memory zoo

One row for each preset in `configs/`, for one GPU. Every iteration has the 16 images of the recipe:
so many at a time x so many micro-batches. Estimated is what the process takes of the device at
most, context and evaluation included, by `d2-memfit estimate` for the device family `cuda`; of it,
what a job may take of a card of that size. Time is that of an iteration, predicted, against the
config without the plan. Nothing is measured on a GPU yet.

Written by `python tools/make_presets.py`.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of models; all if there is none")
    parser.add_argument("--transformers", action="store_true", help="those of that project")
    args = parser.parse_args()
    if args.transformers:
        folder, models, make_job = (
            TRANSFORMERS / "configs",
            MODELS_OF_TRANSFORMERS,
            transformers_job,
        )
    else:
        folder, models, make_job = CONFIGS, MODELS, zoo_job
    rows = []
    for model in args.names or models:
        cards = next((cards for part, cards in CARDS.items() if part in model), ALL_CARDS)
        file = str(folder / f"{model}_{{}}.yaml")
        for card, plan in presets(make_job(model), cards, file):
            Path(file.format(card)).write_text(preset_text(model, card, plan))
            rows.append(preset_row(model, card, plan))
            print("  ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    if not args.names and not args.transformers:
        table = tabulate(rows, HEADER, tablefmt="pipe", disable_numparse=True)
        (ROOT / "docs" / "MEMORY_ZOO.md").write_text(INTRODUCTION + table + "\n")


if __name__ == "__main__":
    main()
