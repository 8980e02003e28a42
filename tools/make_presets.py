#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write the presets in configs/, and the table of docs/PRESETS.md, from plans.

    tools/make_presets.py [NAME ...]        such as COCO-Detection/retinanet_R_50_FPN_3x
    tools/make_presets.py --transformers [NAME ...]                     such as rf_detr_nano

For each model and each card that it makes sense on, two plans of one GPU, with the recipe's 16
images in each iteration: the fastest exact one, and, if it is faster, the fastest one with mixed
precision ("_amp"). A comment says how many objects in each image fit. An hour on two cores for all
of the zoo. Those of projects/Transformers are made with --transformers, and take some minutes each;
so are its guide_*.yaml, exact plans for the commands of a guide, without that comment.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from pages import write_section
from tabulate import tabulate

from d2_memfit.config import budget_of_preset, load_cfg
from d2_memfit.job import Job
from d2_memfit.model_zoo import list_configs
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import ObjectsThatFit, in_words
from d2_memfit.planner.search import Plan, Planner
from d2_memfit.planner.writing import describe_objects

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
# What a plan may use and prefers, by the ending of a preset's name.
PLANS = {"": (["exact"], "exact"), "_amp": (["exact", "precision"], "speed")}

# By the size of the backbone: on smaller cards it does not fit or nothing larger does; on larger
# cards a larger one fits.
CARDS = {
    "mobilenet": ("4GB",),
    "shufflenet": ("4GB",),
    "R_18": ("4GB", "6GB"),
    "R_50": ("4GB", "6GB", "8GB", "12GB", "16GB"),
    "R_101": ("4GB", "6GB", "8GB", "12GB", "16GB", "24GB"),
    "X_101": ("6GB", "8GB", "12GB", "16GB", "24GB"),
}

MODELS = tuple(n.removesuffix(".yaml") for n in list_configs() if n.endswith("_3x.yaml"))

TRANSFORMERS = ROOT / "projects" / "Transformers"
ALL_CARDS = ("4GB", "6GB", "8GB", "12GB", "16GB", "24GB")
MODELS_OF_TRANSFORMERS = (
    *(f"rf_detr_{size}" for size in ("nano", "small", "base", "medium", "large")),
    *(f"rf_detr_seg_{size}" for size in ("nano", "small", "base", "medium", "large")),
    *(f"rt_detr_v2_{size}" for size in ("r18", "r34", "r50", "r101")),
    *(f"mask2former_{size}" for size in ("r50", "swin_tiny", "swin_small")),
)


# Presets for the commands of a guide, projects/Transformers/README.md: config, --batch, --accum,
# --multi_scale, and a micro-batch that fits. Those with masks have their criterion in chunks from
# the start, which is exact and needs no transfers. So has that of the recipe for 4 GB.
GUIDE = {
    "rf_detr_seg_nano_4GB": ("rf_detr_seg_nano", 4, 4, 0, 1),
    "guide_detector_4GB": ("rf_detr_nano", 2, 4, 0, 2),
    "guide_detector_6GB": ("rf_detr_nano", 4, 2, 1, 2),
    "guide_detector_8GB": ("rf_detr_small", 4, 2, 1, 2),
    "guide_detector_16GB": ("rf_detr_base", 8, 1, 1, 4),
    "guide_masks_4GB": ("rf_detr_seg_nano", 1, 8, 0, 1),
    "guide_masks_6GB": ("rf_detr_seg_nano", 2, 4, 1, 1),
    "guide_masks_8GB": ("rf_detr_seg_small", 2, 4, 1, 1),
    "guide_masks_16GB": ("rf_detr_seg_base", 4, 2, 1, 1),
}


def zoo_job(model: str) -> Job:
    return Job.from_cfg(load_cfg(str(CONFIGS / f"{model}.yaml")), 1)


def transformers_job(model: str, opts: Sequence[Any] = ()) -> Job:
    sys.path.insert(0, str(TRANSFORMERS))
    from d2_transformers import Trainer, add_transformers_config

    file = TRANSFORMERS / "configs" / f"{model}.yaml"
    return Job.from_trainer(Trainer, load_cfg(str(file), opts, [add_transformers_config]), 1)


class _WithoutBitsandbytes(Planner):
    """Plans that need no package that only some users have."""

    def is_usable(self, name: str) -> bool:
        return name != "EightBitOptimizerStates" and super().is_usable(name)


def presets(job: Job, cards: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """Plans by the end of their preset's name, such as "6GB" and "6GB_amp".

    Left out are cards on which the model fits with the settings of the card before, and plans with
    AMP that are no faster than the exact one.
    """
    planner = _WithoutBitsandbytes(job, DeviceModel.load("cuda"))
    before: dict[str, dict[str, Any]] = {}
    for card in cards:
        for ending, (tiers, prefer) in PLANS.items():
            name = card + ending
            plan = planner.plan(budget_of_preset(card), tiers, prefer)
            settings = {k: v for k, v in plan.settings.items() if k != "MEMFIT.BUDGET_GB"}
            is_new = settings != before.get(ending)
            is_exact = tiers_of(plan) in ([], ["exact"])
            if plan.fits and is_new and is_exact == (ending == ""):
                before[ending] = settings
                yield name, planner.plan(budget_of_preset(card), tiers, prefer, True)


def guide_preset(name: str) -> str:
    """Text of a preset with the guide's settings, and with those that make it fit."""
    model, batch, accum, multi_scale, micro_batch = GUIDE[name]
    card = name.rsplit("_", 1)[1]
    settings: dict[str, Any] = {
        "SOLVER.IMS_PER_BATCH": batch,
        "SOLVER.ACCUMULATION_STEPS": accum,
        "TRANSFORMERS.MULTI_SCALE_STEPS": 3 * multi_scale,
    }
    if micro_batch < batch:
        settings["MEMFIT.MICRO_BATCH"] = micro_batch
    if "seg" in model:
        settings["MEMFIT.CRITERION.CHUNK_SIZE"] = 512
    job = transformers_job(model, [part for pair in settings.items() for part in pair])
    plan = Planner(job, DeviceModel.load("cuda")).plan(budget_of_preset(card), ["exact"])
    if not plan.fits:
        raise SystemExit(f"{name} needs a budget of {plan.smallest_budget_gb} GB")
    source = "the guide" if name.startswith("guide") else "the recipe"
    return preset_text(model, card, plan, settings, source)


def preset_text(
    model: str,
    name: str,
    plan: Plan,
    more_settings: Mapping[str, Any] = {},
    source: str = "the recipe",
) -> str:
    estimate = plan.estimate
    card = name.split("_", maxsplit=1)[0]
    images = estimate.images_per_gpu * estimate.accumulation_steps
    lines = [
        f"# {Path(model).name} on one GPU of {card}: {images} images in each "
        f"iteration, as in {source},",
        f"# {estimate.micro_batch_size} at a time. Estimated at "
        f"{estimate.device_total_gb:.1f} of {plan.budget_gb:g} GB.",
        *_objects_lines(estimate.objects_that_fit),
        "# Written by tools/make_presets.py.",
        f'_BASE_: "{Path(model).name}.yaml"',
    ]
    tree: dict[str, Any] = {}
    settings = {**more_settings, **plan.settings, "MEMFIT.PRESET": card}
    settings["MEMFIT.PLAN.PREDICTED_GB"] = plan.predicted_gb
    del settings["MEMFIT.BUDGET_GB"]
    for key, value in sorted(settings.items()):
        *nodes, name = key.split(".")
        node = tree
        for part in nodes:
            node = node.setdefault(part, {})
        node[name] = value
    return "\n".join([*lines, *_yaml_lines(tree), ""])


def _objects_lines(objects: Optional[ObjectsThatFit]) -> list[str]:
    text = describe_objects(objects) + "." if objects else ""
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")


def _yaml_lines(tree: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            text = f'"{value}"' if isinstance(value, str) else value
            yield f"{indent}{key}: {text}"


def tiers_of(plan: Plan) -> list[str]:
    """Tiers of a plan's steps. Smaller micro-batches of these models are exact, as tests show."""
    return sorted({"exact" if step.tier == "not known" else step.tier for step in plan.steps})


def preset_row(model: str, name: str, plan: Plan) -> list[str]:
    estimate = plan.estimate
    techniques = [s.name for s in plan.steps if s.name != "smaller micro-batches"]
    windows = estimate.images_per_gpu * estimate.accumulation_steps
    steps = -(-windows // estimate.micro_batch_size)
    return [
        f"{model}_{name}.yaml",
        ", ".join(tiers_of(plan)) or "none",
        ", ".join(techniques) or "none",
        f"{estimate.micro_batch_size} x {steps}",
        f"{estimate.device_total_gb:.2f} of {plan.budget_gb:g}",
        "not yet",
        in_words(plan.time_range),
    ]


HEADER = ["config", "tiers", "techniques", "images x steps", "estimated GB", "measured", "time x"]


def main() -> None:
    make_job: Callable[[str], Job]
    models: Sequence[str]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model (default: all)")
    parser.add_argument(
        "--transformers", action="store_true", help="presets of projects/Transformers"
    )
    args = parser.parse_args()
    if args.transformers:
        folder = TRANSFORMERS / "configs"
        models = (*MODELS_OF_TRANSFORMERS, *GUIDE)
        make_job = transformers_job
    else:
        folder = CONFIGS
        models = MODELS
        make_job = zoo_job
    rows = []
    for model in args.names or models:
        if model in GUIDE:
            (folder / f"{model}.yaml").write_text(guide_preset(model))
            continue
        all_cards = next((cards for part, cards in CARDS.items() if part in model), ALL_CARDS)
        file = str(folder / f"{model}_{{}}.yaml")
        for old in folder.glob(f"{model}_*GB*.yaml"):
            if old.stem not in GUIDE:
                old.unlink()
        cards = [card for card in all_cards if f"{model}_{card}" not in GUIDE]
        for name, plan in presets(make_job(model), cards):
            Path(file.format(name)).write_text(preset_text(model, name, plan))
            rows.append(preset_row(model, name, plan))
            print("  ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    if not args.names and not args.transformers:
        table = tabulate(rows, HEADER, tablefmt="pipe", disable_numparse=True)
        write_section(ROOT / "docs" / "PRESETS.md", "presets", "make_presets.py", table)


if __name__ == "__main__":
    main()
