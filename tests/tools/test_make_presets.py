# Copyright (c) the d2_memfit developers.
import make_presets
import pytest
from d2_transformers import add_transformers_config
from tiny import ROOT

from d2_memfit import estimate_memory, model_zoo
from d2_memfit.common.zoo import detectron2_zoo
from d2_memfit.config import PRESETS, load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import margin_of
from d2_memfit.settings import check_settings

pytestmark = pytest.mark.slow

NAMES = [n for n in model_zoo.list_configs() if n.endswith(("GB.yaml", "GB_amp.yaml"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_keeps_the_recipe(name):
    cfg = model_zoo.get_config(name)
    check_settings(cfg)
    stem = name[: -len(".yaml")]
    base, card = (
        stem[: -len("_amp")].rsplit("_", 1) if cfg.SOLVER.AMP.ENABLED else stem.rsplit("_", 1)
    )
    assert stem.endswith("_amp") == cfg.SOLVER.AMP.ENABLED
    assert card == cfg.MEMFIT.PRESET
    assert card in PRESETS
    recipe = model_zoo.get_config(f"{base}.yaml")
    for key in ("IMS_PER_BATCH", "ACCUMULATION_STEPS", "BASE_LR", "STEPS", "MAX_ITER"):
        assert cfg.SOLVER[key] == recipe.SOLVER[key]
    assert cfg.MODEL == recipe.MODEL
    assert cfg.INPUT == recipe.INPUT


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_leaves_its_margin_free(name):
    job = Job.from_cfg(model_zoo.get_config(name), 1)
    limit = margin_of(job, DeviceModel.load("cuda")).limit_bytes(job.budget_gb * 2**30)
    _, reserved_gb, outside_gb = job.cfg.MEMFIT.PLAN.PREDICTED_GB
    assert reserved_gb + outside_gb <= limit / 2**30 + 0.001


@pytest.mark.parametrize("model", make_presets.MODELS)
def test_recipes_are_those_of_detectron2(model):
    in_zoo = model.replace("COCO-InstanceSegmentation/cascade", "Misc/cascade")
    if any(backbone in model for backbone in ("R_18", "mobilenet", "shufflenet")):
        pytest.skip("Detectron2's zoo has no such backbone")
    ours = model_zoo.get_config(f"{model}.yaml")
    assert ours.dump() == load_cfg(str(detectron2_zoo() / f"{in_zoo}.yaml")).dump()


@pytest.mark.parametrize("name", make_presets.GUIDE)
def test_a_preset_for_the_guide_has_its_settings(name):
    model, batch, accum, multi_scale, _ = make_presets.GUIDE[name]
    folder = make_presets.TRANSFORMERS / "configs"
    cfg, base = (
        load_cfg(str(folder / f"{file}.yaml"), (), [add_transformers_config])
        for file in (name, model)
    )
    check_settings(cfg)
    assert cfg.MODEL == base.MODEL
    assert (batch, accum) == (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS)
    assert 3 * multi_scale == cfg.TRANSFORMERS.MULTI_SCALE_STEPS
    assert cfg.TRANSFORMERS.RESOLUTION == base.TRANSFORMERS.RESOLUTION
    assert name.endswith(f"_{cfg.MEMFIT.PRESET}")
    assert (cfg.MEMFIT.CRITERION.CHUNK_SIZE == 512) == cfg.MODEL.MASK_ON


@pytest.mark.exhaustive
def test_masks_at_384_pixels_fit_4_gb():
    for name in ("guide_masks_4GB", "rf_detr_seg_nano_4GB"):
        text = (make_presets.TRANSFORMERS / "configs" / f"{name}.yaml").read_text()
        assert make_presets.guide_preset(name) == text


def test_a_preset_needs_what_its_file_says():
    name = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x_6GB.yaml"
    gb = estimate_memory(model_zoo.get_config(name), device="cuda").device_total_gb
    assert f"Estimated at {gb:.1f} of 5.5 GB" in (make_presets.CONFIGS / name).read_text()


@pytest.mark.parametrize(
    ("model", "card"),
    [
        pytest.param("COCO-Detection/faster_rcnn_R_50_FPN_3x", "6GB", marks=pytest.mark.long),
        pytest.param(
            "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x", "4GB", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "COCO-InstanceSegmentation/mask_rcnn_shufflenet_v2_x1_0_FPN_3x",
            "4GB",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_preset_is_what_its_plan_says(model, card):
    plans = dict(make_presets.presets(make_presets.zoo_job(model), [card]))
    assert list(plans) == [card, f"{card}_amp"]
    assert plans[f"{card}_amp"].time_factor < 0.98 * plans[card].time_factor
    for name, plan in plans.items():
        text = (make_presets.CONFIGS / f"{model}_{name}.yaml").read_text()
        assert make_presets.preset_text(model, name, plan) == text
        cells = make_presets.preset_row(model, name, plan)
        assert [str(cell) for cell in cells] == documented()[f"{model}_{name}.yaml"]
        of_preset = estimate_memory(model_zoo.get_config(f"{model}_{name}.yaml"), device="cuda")
        assert of_preset.device_total_gb == plan.estimate.device_total_gb


def documented():
    """Rows of docs/PRESETS.md, by config."""
    lines = (ROOT / "docs" / "PRESETS.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines
        if line.startswith("| COCO-")
    ]
    return {row[0]: row for row in rows}


def test_all_presets_are_documented():
    assert sorted(documented()) == sorted(NAMES)
    assert f"has {len(NAMES)} presets" in (ROOT / "docs" / "PRESETS.md").read_text()
