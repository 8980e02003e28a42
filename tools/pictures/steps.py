# Copyright (c) the d2_memfit developers.
"""How a plan makes a job fit: bars by owner, before it and after each of its steps."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from d2_memfit import estimate_memory, plan_memory
from d2_memfit.config import budget_of_preset, load_cfg
from d2_memfit.model_zoo import get_config_file

from .owners import GROUPS, RECIPE, REST, grouped

CARD = "6GB"


def draw(path: Path) -> None:
    budget_gb = budget_of_preset(CARD)
    bars = bars_of_plan(budget_gb)
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(9, 0.75 * len(bars) + 1.5), layout="constrained")
    names = [name for name, _ in bars]
    left = [0.0] * len(bars)
    for group, (color, hatch) in GROUPS.items():
        widths = [sizes[group] for _, sizes in bars]
        axes.barh(names, widths, 0.6, left, label=group, color=color, hatch=hatch, edgecolor="w")
        left = [a + b for a, b in zip(left, widths)]
    for place, total in enumerate(left):
        axes.annotate(f"{total:.1f} GB", (max(total, budget_gb) + 0.2, place), va="center")
    axes.axvline(budget_gb, color="black", linestyle="-.")
    text = f"{budget_gb:g} GB: what a process gets of a card of {CARD[:-2]} GB"
    axes.annotate(text, (budget_gb + 0.2, len(bars) - 0.5), va="center", fontsize=9)
    axes.set_ylim(len(bars) - 0.25, -0.5)
    axes.set_xlim(0, max(left) * 1.15)
    axes.set_xlabel("GB of the device at the peak of training, estimated")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def bars_of_plan(budget_gb: float) -> list[tuple[str, dict[str, float]]]:
    """Names of bars, and the GB of each group of owners."""
    cfg = load_cfg(get_config_file(RECIPE))
    plan = plan_memory(cfg, budget_gb, device="cuda")
    name = f"the recipe, {plan.before.images_per_gpu} images at a time"
    bars: list[tuple[str, float, dict[str, Any]]] = [(name, plan.before.device_total_gb, {})]
    settings: dict[str, Any] = {}
    for step in plan.steps:
        settings = {**settings, **step.settings}
        bars.append((f"+ {step.name}\n{text_of(step.settings)}", step.gb_after, settings))
    faster = plan_memory(cfg, budget_gb, device="cuda", prefer="speed")
    if faster.settings != plan.settings:
        name = f"or, perhaps faster\n{text_of(faster.settings)}"
        bars.append((name, faster.estimate.device_total_gb, faster.settings))
    return [(name, sizes_of(settings, total)) for name, total, settings in bars]


def text_of(settings: dict[str, Any]) -> str:
    key, value = next(iter(settings.items()))
    return f"{key} {value}"


def sizes_of(settings: dict[str, Any], total_gb: float) -> dict[str, float]:
    opts = [text for setting in settings.items() for text in setting]
    cfg = load_cfg(get_config_file(RECIPE), opts)
    breakdown = estimate_memory(cfg, device="cuda", evaluates=False).breakdown
    sizes = grouped(breakdown.items())
    sizes[REST] = total_gb - sum(breakdown.values())
    return sizes
