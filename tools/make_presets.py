#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write presets, which are exact plans for a size of card, and the grid of docs/PRESETS.md.

    tools/make_presets.py configs/COCO-Detection/retinanet_R_50_FPN_3x_8GB.yaml ...
    tools/make_presets.py                                              only the grid, from the files

The name of a preset is that of its recipe and of the card. A file with a recipe of its own, which
has the node SOLVER, keeps its settings, and the plan adds what is missing: guide_*.yaml of
projects/Transformers are such files.
"""

import argparse
import sys
from pathlib import Path

import yaml
from pages import write_section
from tabulate import tabulate

from d2_memfit import Job, plan_memory
from d2_memfit.config.cards import PRESETS
from d2_memfit.config.load import load_cfg
from d2_memfit.planner.plan_file import keys_as_yaml

ROOT = Path(__file__).resolve().parents[1]
TRANSFORMERS = ROOT / "projects" / "Transformers"


def job_of(file: Path) -> Job:
    if TRANSFORMERS not in file.parents:
        return Job.from_cfg(load_cfg(str(file)), 1)
    sys.path.insert(0, str(TRANSFORMERS))
    from d2_transformers import Trainer, add_transformers_config

    return Job.from_trainer(Trainer, load_cfg(str(file), (), [add_transformers_config]), 1)


def preset(file: Path) -> str:
    name, card = file.stem.rsplit("_", 1)
    keys = yaml.safe_load(file.read_text()) if file.exists() else {}
    if "SOLVER" not in keys:
        keys = {"_BASE_": f"{name}.yaml", "MEMFIT": {}}
    job = job_of(file if "SOLVER" in keys else file.with_name(keys["_BASE_"]))
    plan = plan_memory(job, PRESETS[card], allow=["exact"], device="cuda")
    if not plan.fits:
        raise SystemExit(f"{file} needs a budget of {plan.smallest_budget_gb} GB")
    keys["MEMFIT"].update(yaml.safe_load(keys_as_yaml(job, plan))["MEMFIT"], PRESET=card)
    del keys["MEMFIT"]["BUDGET_GB"]
    e = plan.estimate
    return (
        f"# {keys['_BASE_']} on one GPU of {card}: {job.window} images in each "
        f"iteration,\n# {e.micro_batch_size} at a time. Estimated at {e.device_total_gb:.1f} of "
        f"{plan.budget_gb:g} GB.\n# Written by tools/make_presets.py.\n"
        + yaml.safe_dump(keys, default_flow_style=None, sort_keys=False, width=10_000)
    )


def grid() -> str:
    rows: dict[str, dict[str, str]] = {}
    for file in sorted((ROOT / "configs").glob("*/*GB.yaml")):
        model, card = f"{file.parent.name}/{file.stem}".rsplit("_", 1)
        keys = yaml.safe_load(file.read_text())["MEMFIT"]
        more = "*" if keys.keys() - {"MICRO_BATCH", "OOM", "PRESET"} else ""
        rows.setdefault(model, {})[card] = f"{keys['MICRO_BATCH']}{more}"
    cards = [card for card in PRESETS if any(card in row for row in rows.values())]
    cells = [[model, *map(row.get, cards)] for model, row in rows.items()]
    return tabulate(cells, ["config", *cards], tablefmt="pipe", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="presets to write")
    for file in parser.parse_args().files:
        file.write_text(preset(file.resolve()))
    write_section(ROOT / "docs" / "PRESETS.md", "presets", "make_presets.py", grid())


if __name__ == "__main__":
    main()
