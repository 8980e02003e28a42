# Copyright (c) the d2_memfit developers.
"""Detectors of the transformers library as Detectron2's: losses, Instances, config, weights."""

import copy

import pytest
import torch
from d2_transformers import Trainer
from d2_transformers.data import ResizeSquare, build_mapper
from detectron2.data import DatasetCatalog
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from tiny import images, parameters, peak_of, relative_difference, tiny_model
from tiny_transformers import (
    MODELS,
    NUM_QUERIES,
    RESOLUTION,
    draw_the_same_for_each_row,
    tiny_transformers_cfg,
)

from d2_memfit import AccumulatingTrainer, Job
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.settings import NormalizerOptions
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.probe import run_for_real
from d2_memfit.planner.steps import Session

transformers = pytest.importorskip("transformers")
EACH_MODEL = pytest.mark.parametrize(("kind", "has_masks"), MODELS)


def made(kind="rf_detr", has_masks=False, **keys):
    cfg = tiny_transformers_cfg(kind, has_masks)
    for key, value in keys.items():
        cfg.TRANSFORMERS[key] = value
    return tiny_model(cfg)


@EACH_MODEL
def test_the_losses_add_up_to_that_of_transformers_and_reach_all_parameters(kind, has_masks):
    model = made(kind, has_masks)
    outputs = []
    model.model.register_forward_hook(lambda module, args, output: outputs.append(output))
    losses = model(images(2))
    total, expected = sum(losses.values()), outputs[0].loss
    assert all(name.startswith("loss_") for name in losses)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    total.backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


@pytest.mark.parametrize(
    ("kind", "has_masks"), [(kind, masks) for kind, masks in MODELS if kind != "rt_detr_v2"]
)
def test_a_window_has_the_gradient_of_one_forward(kind, has_masks, monkeypatch):
    """With 9, 1 and no objects. RT-DETR draws other denoising queries in each forward."""
    draw_the_same_for_each_row(monkeypatch)
    batch = [images(1, first=i, num_instances=n)[0] for i, n in enumerate((9, 1, 0))]
    gradients, cut = [], [[image] for image in batch]
    for batches, policy in (([batch], "window"), (cut, "window"), (cut, "off")):
        model = made(kind, has_masks)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        options = NormalizerOptions(policy)
        trainer = AccumulatingTrainer(model, batches, sgd, len(batches), normalizers=options)
        for module in model.modules():
            if "Drop" in type(module).__name__ or "BatchNorm" in type(module).__name__:
                module.eval()
        with EventStorage():
            trainer.run_step()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    full, window, off = gradients
    assert relative_difference(window, full) < 1e-5
    assert relative_difference(off, full) > 0.02


@EACH_MODEL
def test_evaluation_gives_instances_in_the_size_of_the_file(kind, has_masks):
    model = made(kind, has_masks).eval()
    batch = [{**d, "height": 90, "width": 130} for d in images(2)]
    for d in batch:
        del d["instances"]
    with torch.no_grad():
        outputs = model(batch)
    for output in outputs:
        found = output["instances"]
        assert found.image_size == (90, 130)
        assert len(found) == NUM_QUERIES  # of one class
        assert found.has("pred_masks") == has_masks
        if has_masks:
            assert found.pred_masks.shape == (NUM_QUERIES, 90, 130)


@pytest.mark.parametrize("kind", ["mask2former", "rf_detr"])
def test_the_host_keeps_a_byte_for_each_pixel_of_20_megapixels(kind):
    """One mask at a time is resized, as numbers."""
    cfg, pixels = tiny_transformers_cfg(kind, True), 3648 * 5472
    cfg.MEMFIT.EVALUATION.ON_HOST = True
    batch = [{**images(1, size=RESOLUTION)[0], "height": 3648, "width": 5472}]
    timeline = Session(Job.from_cfg(cfg, 1, batch=batch)).evaluate(batch)
    assert peak_of(timeline) < pixels
    assert NUM_QUERIES * pixels < timeline.host_bytes < (NUM_QUERIES + 7) * pixels


def test_padding_does_not_move_what_is_found():
    """A model whose queries find the whole image finds that image in a padded batch as well."""
    model = made("rt_detr_v2", RESOLUTION=0).eval()
    small, large = images(1, size=64)[0], images(1, size=96)[0]

    def whole_image(module, args, output):
        part = 64 / 96
        box = torch.tensor([part / 2, part / 2, part, part])
        output.pred_boxes = box.expand_as(output.pred_boxes)

    model.model.register_forward_hook(whole_image)
    with torch.no_grad():
        found = model([small, large])[0]["instances"]
    expected = torch.tensor([0.0, 0.0, 64.0, 64.0])
    torch.testing.assert_close(found.pred_boxes.tensor[0], expected, atol=1e-3, rtol=0)


def test_the_targets_are_those_of_the_mapper(coins):
    """Boxes relative to the image, masks in its resolution."""
    cfg = tiny_transformers_cfg(has_masks=True)
    mapper = build_mapper(cfg, is_train=True)
    data = mapper(copy.deepcopy(DatasetCatalog.get("coins_train")[0]))
    assert data["image"].shape == (3, RESOLUTION, RESOLUTION)
    model = tiny_model(cfg)
    labels = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: labels.append(kwargs["labels"]), with_kwargs=True
    )
    polygons = Instances((RESOLUTION, RESOLUTION))
    polygons.gt_boxes = Boxes(torch.tensor([[32.0, 0, 64, 128]]))
    polygons.gt_classes = torch.tensor([0])
    polygons.gt_masks = PolygonMasks([[torch.tensor([32.0, 0, 64, 0, 64, 128, 32, 128]).numpy()]])
    model([data, {"image": data["image"], "instances": polygons}])
    (found,) = labels
    assert len(found[0]["boxes"]) == len(data["instances"])
    for of_image in found[1:]:
        torch.testing.assert_close(of_image["boxes"], torch.tensor([[0.375, 0.5, 0.25, 1.0]]))
        assert of_image["masks"].shape == (1, RESOLUTION, RESOLUTION)
        columns = of_image["masks"][0, 0].nonzero()
        assert (columns.min().item(), columns.max().item()) == (32, 63)


def test_multi_scale_draws_squares_and_a_dry_run_takes_the_largest(coins):
    cfg = tiny_transformers_cfg()
    cfg.DATASETS.TRAIN = ("coins_train",)
    cfg.TRANSFORMERS.MULTI_SCALE_STEPS = 2
    (resize, *_) = build_mapper(cfg, is_train=True).augmentations.augs
    assert isinstance(resize, ResizeSquare)
    image = torch.zeros(50, 70, 3).numpy()
    sides = {resize.get_transform(image).apply_image(image).shape for _ in range(200)}
    assert sides == {(side, side, 3) for side in (64, 96, 128, 160, 192)}
    largest = Job.from_trainer(Trainer, cfg).training_batch(3)
    assert [data["image"].shape for data in largest] == [(3, 192, 192)] * 3


@pytest.mark.parametrize(
    ("kind", "has_masks"), [("rf_detr", True), ("rt_detr_v2", False), ("mask2former", True)]
)
def test_a_real_step_has_the_peak_of_a_dry_one(kind, has_masks):
    cfg = tiny_transformers_cfg(kind, has_masks)
    cfg.SOLVER.IMS_PER_BATCH, cfg.TRANSFORMERS.EMA_DECAY = 2, 0.9
    job = Job.from_trainer(Trainer, cfg, 1, batch=images(2, size=RESOLUTION))
    dry_job = DryJob(job, DeviceModel.load("cpu"), evaluates=False)
    with TensorMeter() as meter:
        next(run_for_real(job, "cpu"))
    assert meter.peak_bytes == pytest.approx(peak_of(dry_job.whole()), rel=0.025)


@EACH_MODEL
def test_what_is_saved_is_loaded_by_transformers_and_by_the_config(kind, has_masks, tmp_path):
    model = made(kind, has_masks)
    model.save_pretrained(str(tmp_path), ["coin"])
    loaded = type(model.model).from_pretrained(str(tmp_path))
    assert loaded.config.id2label == {0: "coin"}
    assert relative_difference(parameters(loaded), parameters(model.model)) == 0
    cfg = tiny_transformers_cfg(kind, has_masks)
    cfg.TRANSFORMERS.SIZE, cfg.TRANSFORMERS.OPTIONS = str(tmp_path), []
    again = tiny_model(cfg, seed=1)
    again.load_pretrained(str(tmp_path))
    assert relative_difference(parameters(again.model), parameters(model.model)) == 0


def test_weights_that_leave_the_backbone_random_are_an_error_that_names_layers(tmp_path):
    model = made()
    model.save_pretrained(str(tmp_path))
    cfg = tiny_transformers_cfg(has_masks=True)
    dinov2 = dict(dict(cfg.TRANSFORMERS.OPTIONS)["backbone_config"], patch_size=8, num_windows=1)
    cfg.TRANSFORMERS.OPTIONS.append(["backbone_config", dinov2])
    other = tiny_model(cfg, seed=1)
    before = parameters(other)
    message = "2 layers of the backbone random.*position_embeddings is 1x65x32 in the weights, and"
    with pytest.raises(ConfigError, match=message):
        other.load_pretrained(str(tmp_path))
    assert relative_difference(parameters(other), before) == 0
