# Copyright (c) the d2_memfit developers.
"""All exact techniques at once, turned on by config keys: the same training."""

import sys

import pytest
import torch
from detectron2.engine import hooks
from detectron2.utils.env import seed_all_rng
from tiny import parameters, relative_difference, run_process, suggested, tiny_cfg

from d2_memfit.cli import train as command
from d2_memfit.techniques.registry import TECHNIQUES


@pytest.fixture
def cfg(coins, tmp_path):
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.BACKBONE.NAME = "build_resnet_fpn_backbone"  # plain Detectron2 has no other one
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ("coins_val",)
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.DATALOADER.NUM_WORKERS = 1
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 3
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    return cfg


class Trainer(command.Trainer):
    """What is sampled at random is a function of the iteration."""

    def build_hooks(self):
        reseed = hooks.CallbackHook(before_step=lambda trainer: torch.manual_seed(trainer.iter))
        return [reseed, *super().build_hooks()]


def with_all_exact_techniques(cfg):
    cfg = cfg.clone()
    cfg.MEMFIT.HOST.SHARED_DATASET, cfg.MEMFIT.HOST.BUDGET_GB = True, 1000
    for technique in TECHNIQUES:
        if technique.tier == "exact" and "ranks" not in technique.needs:
            for key, value in suggested(technique.name, cfg).items():
                cfg.merge_from_list([key, value])
    cfg.MEMFIT.MATCHING.CHUNK_SIZE, cfg.MEMFIT.HEADS.CHUNK_SIZE = 100, 5
    return cfg


def train(cfg):
    seed_all_rng(0)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    return trainer


def test_weights_and_evaluation_are_those_without(cfg, log):
    plain = train(cfg)
    changed = train(with_all_exact_techniques(cfg))
    for name in ("ActivationCheckpointing", "ChunkedMatching", "SharedDataset", "EvaluationOnHost"):
        assert f"Technique {name} (exact) is on" in log.text
    difference = relative_difference(parameters(changed.model), parameters(plain.model))
    assert difference < 1e-6
    results, expected = changed._last_eval_results, plain._last_eval_results
    for task in ("bbox", "segm"):
        assert results[task] == pytest.approx(expected[task], abs=1e-3, nan_ok=True)
    assert changed.model.state_dict().keys() == plain.model.state_dict().keys()


PLAIN = """
import sys
import torch
from detectron2.config import get_cfg
from detectron2.data.detection_utils import read_image
from detectron2.engine import DefaultPredictor
cfg = get_cfg()
cfg.merge_from_file(sys.argv[1])
predictor = DefaultPredictor(cfg)
state = torch.load(cfg.MODEL.WEIGHTS)["model"]
predictor.model.load_state_dict(state, strict=True)
print(len(predictor(read_image(sys.argv[2], "BGR"))["instances"]), "d2_memfit" in sys.modules)
"""
# As Detectron2's tools/deploy/export_model.py does. In v0.6, the package detectron2.export itself
# imports caffe2, which PyTorch no longer has.
TRACED = """
import types
import detectron2
package = types.ModuleType("detectron2.export")
package.__path__ = [detectron2.__path__[0] + "/export"]
sys.modules[package.__name__] = package
from detectron2.export.flatten import TracingAdapter
def inference(model, inputs):
    return [{"instances": model.inference(inputs, do_postprocess=False)[0]}]
torch.manual_seed(0)
image, other = torch.rand(3, 96, 160) * 255, torch.rand(3, 128, 112) * 255
adapter = TracingAdapter(predictor.model, [{"image": image}], inference).eval()
with torch.no_grad():
    traced = torch.jit.trace(adapter, (image,), check_trace=False)
    for pixels in (image, other):
        boxes, found = adapter(pixels)[0], traced(pixels)[0]
        assert len(boxes) == 20 and torch.allclose(boxes, found, atol=1e-3)
"""


@pytest.mark.slow
def test_plain_detectron2_loads_and_traces_the_model_that_training_leaves(cfg, coins):
    cfg.MODEL.BACKBONE.NAME = "build_resnet_fpn_backbone"  # one that Detectron2 has
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    train(with_all_exact_techniques(cfg))
    files = [f"{cfg.OUTPUT_DIR}/detectron2_config.yaml", coins / "val" / "000.png"]
    run = run_process([sys.executable, "-c", PLAIN + TRACED, *files])
    assert run.returncode == 0, run.stderr
    assert run.stdout == "20 False\n", run.stderr
    assert "not found" not in run.stderr  # the checkpointer's words for missing weights
