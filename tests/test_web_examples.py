# Copyright (c) the d2_memfit developers.
"""Code that people copy from the web, with the two changes that GETTING_STARTED names.

The files in web_examples/ are the three of "How to resolve GPU memory issues during Detectron2 Mask
R-CNN training?", an answer of January 2025. ``get_cfg`` is d2_memfit's, and ``default_setup`` has
the second argument without which Detectron2 refuses the call.
"""

import importlib.util
import runpy

import pytest
import torch
from detectron2.config import get_cfg as get_detectron2_cfg
from forks import run_forked
from tiny import ROOT

from d2_memfit import MemfitTrainer, estimate_memory
from d2_memfit.config.settings import check_settings

if importlib.util.find_spec("pkg_resources") is None:
    pytest.skip(
        "Detectron2's model_zoo needs pkg_resources: pip install 'setuptools<81'",
        allow_module_level=True,
    )


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """OUTPUT_DIR is relative in them."""
    monkeypatch.chdir(tmp_path)


def cfg_of(example, **arguments):
    """What the function of an example returns, with a smaller model."""
    function = runpy.run_path(str(ROOT / "tests" / "web_examples" / example))["configure_training"]
    cfg = function(**arguments)
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 64
    cfg.MODEL.ROI_MASK_HEAD.NUM_CONV, cfg.MODEL.ROI_MASK_HEAD.CONV_DIM = 1, 16
    return cfg


def trained(cfg):
    """A trainer after one iteration on small photographs; of it, forwards and optimizer steps.

    The forwards are those that gradients come from.
    """
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.MODEL.WEIGHTS, cfg.MODEL.DEVICE = "", "cpu"
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (64,), 96
    cfg.SOLVER.MAX_ITER = 1
    cfg.MEMFIT.NORMALIZERS.POLICY = "off"  # a test of the losses has forwards, too
    trainer = MemfitTrainer(cfg)
    trainer.checkpointer.save_to_disk = False
    forwards, steps = [], []
    trainer.model.register_forward_hook(lambda *_: torch.is_grad_enabled() and forwards.append(1))
    trainer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trainer.train()
    return trainer, len(forwards), len(steps)


def test_batch_and_workers(coins):
    cfg = cfg_of("batch_and_workers.py", batch_size=4, num_workers=2)
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.DATALOADER.NUM_WORKERS) == (4, 2)
    assert cfg.OUTPUT_DIR == "./output/bs4_workers2"
    check_settings(cfg, 2)

    trainer, forwards, steps = trained(cfg)
    assert (forwards, steps) == (1, 1)
    assert trainer.storage.latest()["effective_batch"][0] == 4


def test_image_sizes(coins):
    cfg = cfg_of("image_sizes.py", min_size=600, max_size=800)
    assert (cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN) == ((600,), 800)
    check_settings(cfg)
    cfg.SOLVER.IMS_PER_BATCH = 2
    assert estimate_memory(cfg).image_size == (600, 800)

    cfg.DATALOADER.NUM_WORKERS = 0
    _, forwards, steps = trained(cfg)
    assert (forwards, steps) == (1, 1)


def test_accumulation_steps(coins):
    cfg = cfg_of("accumulation_steps.py", accumulation_steps=2, batch_size=2)
    assert (cfg.SOLVER.ACCUMULATION_STEPS, cfg.SOLVER.IMS_PER_BATCH) == (2, 2)
    check_settings(cfg)

    cfg.DATALOADER.NUM_WORKERS = 0
    trainer, forwards, steps = trained(cfg)
    assert (forwards, steps) == (2, 1)
    assert trainer.storage.latest()["effective_batch"][0] == 4


def test_the_third_key_is_not_detectron2s():
    assert "ACCUMULATION_STEPS" not in get_detectron2_cfg().SOLVER


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("batch_and_workers.py", "Dataset batch size: 4\nDataloader worker count: 2\n"),
        (
            "image_sizes.py",
            "Minimum resize size: (600,)\nMaximum resize size: 800\n",
        ),
        ("accumulation_steps.py", "Gradient accumulation steps: 2\nBatch Size: 2\n"),
    ],
)
def test_a_script_runs_to_its_end(example, said, tmp_path):
    done = run_forked(ROOT / "tests" / "web_examples" / example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(said)
