# Copyright (c) the d2_memfit developers.
import re

import make_presets
import pytest
import yaml
from d2_transformers import add_transformers_config
from pages import section
from tiny import ROOT

from d2_memfit.config.files import DETECTRON2_ZOO
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import check_settings
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob

CONFIGS = ROOT / "configs"
PRESETS = [
    *sorted(CONFIGS.glob("*/*GB.yaml")),
    *sorted((make_presets.TRANSFORMERS / "configs").glob("*GB.yaml")),
]


def recipe_of(preset):
    return preset.with_name(yaml.safe_load(preset.read_text())["_BASE_"])


def test_a_preset_is_its_recipe_with_a_plan():
    for preset in PRESETS:
        cfg, recipe = (
            load_cfg(str(file), (), [add_transformers_config])
            for file in (preset, recipe_of(preset))
        )
        check_settings(cfg)
        assert preset.stem.endswith(f"_{cfg.MEMFIT.PRESET}"), preset
        is_of_guide = preset.stem.startswith("guide_")
        images = cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATION_STEPS
        assert images == (8 if is_of_guide else 16), preset
        if is_of_guide:
            for key in ("IMS_PER_BATCH", "ACCUMULATION_STEPS"):
                recipe.SOLVER[key] = cfg.SOLVER[key]
            recipe.TRANSFORMERS.MULTI_SCALE_STEPS = cfg.TRANSFORMERS.MULTI_SCALE_STEPS
        recipe.MEMFIT = cfg.MEMFIT
        assert cfg == recipe, preset


def test_recipes_are_those_of_detectron2():
    for recipe in CONFIGS.glob("*/*_3x.yaml"):
        folder = "Misc" if "cascade" in recipe.name else recipe.parent.name
        theirs = DETECTRON2_ZOO / folder / recipe.name
        if theirs.exists():  # the zoo has no R-18
            assert load_cfg(str(recipe)).dump() == load_cfg(str(theirs)).dump(), recipe


def check_memory(presets, evaluates):
    for preset in presets:
        dry_job = DryJob(make_presets.job_of(preset), DeviceModel.load("cuda"), evaluates=evaluates)
        dry_job.whole()
        said_gb = float(re.search(r"Estimated at (\S+) of", preset.read_text())[1])
        assert dry_job.fits(dry_job.job.budget_gb), preset
        assert dry_job.total_bytes() / 2**30 == pytest.approx(said_gb, abs=0.1), preset


@pytest.mark.slow
def test_a_preset_of_each_model_of_the_zoo_needs_what_its_file_says():
    of_zoo = {recipe_of(p): p for p in PRESETS if CONFIGS in p.parents}
    check_memory(of_zoo.values(), evaluates=False)


@pytest.mark.sweep
def test_each_preset_needs_what_its_file_says():
    check_memory(PRESETS, evaluates=True)


@pytest.mark.slow
def test_a_preset_is_what_the_tool_writes():
    file = CONFIGS / "COCO-Detection" / "retinanet_R_50_FPN_3x_4GB.yaml"
    assert yaml.safe_load(make_presets.preset(file)) == yaml.safe_load(file.read_text())


def test_the_page_has_all_presets():
    page = ROOT / "docs" / "PRESETS.md"
    assert section(page, "presets", "make_presets.py") == make_presets.grid()
