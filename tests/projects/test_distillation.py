# Copyright (c) the d2_memfit developers.
"""A teacher in projects/Distillation: its gradients, its memory, and checkpoints without it."""

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils.events import EventStorage
from forks import run_forked
from pasted import paste
from tiny import (
    ROOT,
    every_anchor_counts,
    images,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)
from train_distillation import Trainer, add_distillation_config, channel_wise_loss

from d2_memfit import AccumulatingTrainer
from d2_memfit.errors import CheckpointError, ConfigError
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.estimates import steps

CHANNELS = 16


@pytest.fixture
def cfg(tmp_path):
    """A student's config, and a teacher's files."""
    teacher = tiny_cfg("faster_rcnn")
    teacher.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    (tmp_path / "teacher.yaml").write_text(teacher.dump())
    model = tiny_model(teacher, seed=1)
    torch.save({"model": model.state_dict()}, tmp_path / "teacher.pth")
    cfg = tiny_cfg("faster_rcnn")
    add_distillation_config(cfg)
    cfg.DISTILLATION.TEACHER_CONFIG = str(tmp_path / "teacher.yaml")
    cfg.DISTILLATION.TEACHER_WEIGHTS = str(tmp_path / "teacher.pth")
    return cfg


def student_of(cfg, seed=0):
    torch.manual_seed(seed)
    return Trainer.build_model(cfg)


def distilled_gradients(cfg, cut):
    """Gradients of eight images in micro-batches, with those of the student's own losses."""
    model = student_of(every_anchor_counts(cfg))
    model.teacher.load_state_dict(student_of(cfg, seed=1).teacher.state_dict())
    batch = images(8)
    loader = [batch[i : i + cut] for i in range(0, 8, cut)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = parameters(model)

    def loss_fn(model, batch):
        losses = model(batch)
        return {name: losses[name] for name in ("loss_distillation", "loss_rpn_cls")}

    AccumulatingTrainer(model, loader, optimizer, 8 // cut, loss_fn=loss_fn).train(0, 1)
    return {name: before[name] - p for name, p in parameters(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2])
def test_accumulated_gradients_are_those_of_the_full_batch(cfg, cut):
    expected = distilled_gradients(cfg, 8)
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert relative_difference(distilled_gradients(cfg, cut), expected) < 1e-5


def test_the_loss_is_zero_for_equal_features_and_counts_neither_size_nor_offset():
    features = torch.randn(CHANNELS, 6, 8, generator=torch.Generator().manual_seed(0))
    offsets = torch.arange(CHANNELS)[:, None, None]
    assert channel_wise_loss(features, features) == 0
    assert channel_wise_loss(features + offsets, features).item() == pytest.approx(0, abs=1e-6)
    assert channel_wise_loss(features.flip(1), features) > 0.1


def test_checkpoints_have_the_student_alone(cfg, tmp_path):
    model = student_of(cfg)
    state = model.state_dict()
    plain = tiny_model(tiny_cfg("faster_rcnn"), seed=1)
    assert state.keys() == plain.state_dict().keys()
    assert not model.load_state_dict(state).missing_keys
    DetectionCheckpointer(model, str(tmp_path)).save("student")
    DetectionCheckpointer(plain).load(str(tmp_path / "student.pth"))
    batch = [{k: v for k, v in i.items() if k != "instances"} for i in images(2)]
    with torch.inference_mode():
        outputs = [m.eval()(batch)[0]["instances"] for m in (model, plain)]
    assert torch.equal(outputs[0].scores, outputs[1].scores)


def test_the_teacher_gets_pixels_as_it_was_trained_with(cfg):
    cfg.INPUT.FORMAT = "RGB"
    cfg.MODEL.PIXEL_MEAN = [1.0, 2.0, 3.0]
    model, seen = student_of(cfg).train(), []
    model.teacher.backbone.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    batch = images(2)
    with EventStorage():
        model(batch)
    flipped = [{"image": image["image"].flip(0)} for image in batch]
    expected = tiny_model(tiny_cfg("faster_rcnn")).preprocess_image(flipped).tensor
    assert torch.equal(seen[0], expected)


def test_the_teacher_is_frozen_and_in_evaluation_mode(cfg):
    model = student_of(cfg).train()
    assert model.training
    assert not any(module.training for module in model.teacher.modules())
    assert not any(p.requires_grad for p in model.teacher.parameters())


@pytest.mark.slow
def test_a_dry_run_has_the_memory_of_the_teacher_and_of_a_computed_step(cfg, computing):
    def peak(cfg, trainer=None):
        job = Job.from_any(cfg, trainer, batch=WorstCase((64, 64), 3))
        return sum(steps.train(job, [job.training_batch(2)]).peak().values())

    plain, dry = peak(tiny_cfg("faster_rcnn")), peak(cfg, Trainer)
    teacher = sum(p.numel() * p.element_size() for p in student_of(cfg).teacher.parameters())
    assert dry > plain + teacher
    computing()
    assert dry == pytest.approx(peak(cfg, Trainer), rel=0.001)


@pytest.mark.long
def test_the_command_that_ends_a_training_works_when_it_is_pasted(cfg, coins, tmp_path):
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 1, 1
    cfg.DATALOADER.NUM_WORKERS = 0
    (tmp_path / "student.yaml").write_text(cfg.dump())
    (tmp_path / "here").symlink_to(ROOT / "projects" / "Distillation")
    trained = run_forked(
        *("here/train_distillation.py", "--config-file", "student.yaml"),
        *("--coco", "coins_train", coins / "train.json", coins / "train"),
        cwd=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr[-4000:]
    paste(trained.stdout, tmp_path, FOLDER=coins / "val")
    assert len(list((tmp_path / "predictions" / "pictures").glob("*.png"))) == 16


def test_weights_of_another_teacher_are_refused(cfg, tmp_path, monkeypatch):
    model = student_of(cfg)
    state = {k: v for k, v in model.teacher.state_dict().items() if "fpn_output3" not in k}
    torch.save({"model": state}, tmp_path / "other.pth")
    cfg.DISTILLATION.TEACHER_WEIGHTS = str(tmp_path / "other.pth")
    trainer = Trainer.__new__(Trainer)
    trainer.cfg, trainer._trainer = cfg, type("Inner", (), {"model": model})()
    with pytest.raises(CheckpointError, match=r"do not fit DISTILLATION.TEACHER_CONFIG"):
        trainer.resume_or_load()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("DISTILLATION.TEACHER_CONFIG", "", "TEACHER_CONFIG is empty"),
        ("MODEL.FPN.OUT_CHANNELS", 32, "set the student's MODEL.FPN.OUT_CHANNELS to 16, got 32"),
        ("MODEL.META_ARCHITECTURE", "PanopticFPN", "META_ARCHITECTURE must be GeneralizedRCNN or"),
    ],
)
def test_bad_input_is_said_in_one_line(cfg, key, value, message):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=message) as error:
        student_of(cfg)
    assert "\n" not in str(error.value)
