import make_presets
import pytest
from tiny import ROOT

from d2_memfit import estimate_memory, model_zoo
from d2_memfit.config import check_config, load_cfg
from d2_memfit.config_files import detectron2_zoo
from d2_memfit.presets import PRESETS

NAMES = [n for n in model_zoo.list_configs() if n.endswith("GB.yaml")]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_keeps_the_recipe(name):
    cfg = model_zoo.get_config(name)
    check_config(cfg)
    base, card = name[: -len(".yaml")].rsplit("_", 1)
    assert card == cfg.MEMFIT.PRESET
    assert card in PRESETS
    recipe = model_zoo.get_config(f"{base}.yaml")
    for key in ("IMS_PER_BATCH", "ACCUMULATION_STEPS", "BASE_LR", "STEPS", "MAX_ITER"):
        assert cfg.SOLVER[key] == recipe.SOLVER[key]
    assert cfg.MODEL == recipe.MODEL
    assert cfg.INPUT == recipe.INPUT


@pytest.mark.parametrize("model", make_presets.MODELS)
def test_recipes_are_those_of_detectron2(model):
    in_zoo = model.replace("COCO-InstanceSegmentation/cascade", "Misc/cascade")
    if "R_18" in model:
        pytest.skip("Detectron2 has no ResNet-18")
    ours = model_zoo.get_config(f"{model}.yaml")
    assert ours.dump() == load_cfg(str(detectron2_zoo() / f"{in_zoo}.yaml")).dump()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "card"),
    [
        ("COCO-Detection/faster_rcnn_R_50_FPN_3x", "6GB"),
        ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "4GB"),
    ],
)
def test_a_preset_is_what_its_plan_says(model, card):
    file = str(make_presets.CONFIGS / f"{model}_{{}}.yaml")
    ((_, plan),) = make_presets.presets(make_presets.zoo_job(model), [card], file)
    text = (make_presets.CONFIGS / f"{model}_{card}.yaml").read_text()
    assert make_presets.preset_text(model, card, plan) == text
    cells = make_presets.preset_row(model, card, plan)
    assert [str(cell) for cell in cells] == documented()[f"{model}_{card}.yaml"]
    of_preset = estimate_memory(model_zoo.get_config(f"{model}_{card}.yaml"), device="cuda")
    assert of_preset.device_total_gb == plan.estimate.device_total_gb


def documented():
    """Rows of docs/MEMORY_ZOO.md, by config."""
    lines = (ROOT / "docs" / "MEMORY_ZOO.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "GB.yaml" in line]
    return {row[0]: row for row in rows}


def test_all_presets_are_documented():
    assert sorted(documented()) == sorted(NAMES)
