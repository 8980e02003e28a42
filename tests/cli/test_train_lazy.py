# Copyright (c) the d2_memfit developers.
"""``d2-memfit train`` of a LazyConfig made of Detectron2's own parts."""

import pytest
import torch
from forks import FORKED_RANKS, run_forked
from omegaconf import OmegaConf
from tiny import ROOT, read_metrics

from d2_memfit.cli.command_line import main

TRAIN_NET = ROOT / "tools" / "train_net.py"

CONFIG = """
import detectron2.data.transforms as T
import torch
from detectron2.config import LazyCall as L
from detectron2.data import DatasetMapper, build_detection_test_loader
from detectron2.data import build_detection_train_loader, get_detection_dataset_dicts
from detectron2.evaluation import COCOEvaluator
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler

from d2_memfit.data.registration import register_coco
from tiny import tiny_cfg, tiny_model

for split in ("train", "val"):
    register_coco(f"lazy_{split}", f"COINS/{split}.json", f"COINS/{split}")

model = L(tiny_model)(cfg=L(tiny_cfg)(family="faster_rcnn", fpn=False))
mapper = dict(
    augmentations=[L(T.ResizeShortestEdge)(short_edge_length=64)], image_format="BGR"
)
dataloader = dict(
    train=L(build_detection_train_loader)(
        dataset=L(get_detection_dataset_dicts)(names="lazy_train"),
        mapper=L(DatasetMapper)(is_train=True, **mapper),
        total_batch_size=2,
        num_workers=0,
    ),
    test=L(build_detection_test_loader)(
        dataset=L(get_detection_dataset_dicts)(names="lazy_val", filter_empty=False),
        mapper=L(DatasetMapper)(is_train=False, **mapper),
    ),
    evaluator=L(COCOEvaluator)(dataset_name="lazy_val", output_dir="OUTPUT/inference"),
)
optimizer = L(torch.optim.SGD)(
    params=L(get_default_optimizer_params)(base_lr=0.01), lr=0.01, momentum=0.9
)
lr_multiplier = L(CosineParamScheduler)(start_value=1.0, end_value=0.1)
train = dict(
    output_dir="OUTPUT", init_checkpoint="", max_iter=2, amp=dict(enabled=False),
    ddp=dict(broadcast_buffers=False), checkpointer=dict(period=100), eval_period=0,
    log_period=1, device="cuda",
)
"""


@pytest.fixture
def arguments(coins, tmp_path):
    config = tmp_path / "config.py"
    output = str(tmp_path / "output")
    config.write_text(CONFIG.replace("COINS", str(coins)).replace("OUTPUT", output))
    return ["--config-file", str(config)]


def run(*arguments):
    main(["train", *map(str, arguments)])


def test_accumulation_mixed_precision_evaluation_and_resuming(arguments, tmp_path):
    output = tmp_path / "output"
    arguments += ["train.accumulation_steps=3"]
    run(*arguments, "train.amp.enabled=True", "+train.memfit.amp_dtype=bfloat16")
    metrics = read_metrics(output)
    assert [m["effective_batch"] for m in metrics if "effective_batch" in m] == [6, 6]
    assert any("bbox/AP50" in m for m in metrics)
    checkpoint = torch.load(output / "model_final.pth", weights_only=True)
    assert checkpoint["trainer"]["optimizer"]["state"]

    run("--resume", *arguments, "train.max_iter=3")
    iterations = [m["iteration"] for m in read_metrics(output) if "effective_batch" in m]
    assert iterations == [0, 1, 2]

    results = output / "inference" / "coco_instances_results.json"
    results.unlink()
    arguments += ["train.memfit.host.shared_dataset=True"]
    run("--eval-only", *arguments, f"train.init_checkpoint={output / 'model_final.pth'}")
    assert results.exists()


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks cannot share one GPU")
def test_two_ranks(arguments, tmp_path):
    options = ["--num-gpus", 2, "--dist-url", "auto", "train.accumulation_steps=3"]
    result = run_forked("-c", FORKED_RANKS, TRAIN_NET, *arguments, *options)
    assert result.returncode == 0, result.stderr[-4000:]
    metrics = read_metrics(tmp_path / "output")
    assert [m["effective_batch"] for m in metrics if "effective_batch" in m] == [6, 6]
    assert (tmp_path / "output" / "log.txt.rank1").exists()


@pytest.mark.parametrize(
    "options",
    [
        "train.accumulation_steps=0",
        "+train.memfit.micro_batch=1.5",
        "+train.memfit.head.chunk_size=1",
        "+train.oom.policy=split",
        "+train.amp.dtype=bfloat16",
        "+train.memfit.amp_dtype=float8",
        "--hold-out 0.2",
        "--config-file no.py",
        "train.max_iter=2 --resume",
    ],
)
def test_bad_input_is_one_line(arguments, prose, tmp_path, capsys, options):
    words = options.split(" ")
    with pytest.raises(SystemExit, match="2"):
        run(*(words if words[0] == "--config-file" else arguments + words))
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    prose(printed)
    assert not (tmp_path / "output").exists()


def test_the_options_of_a_budget_are_those_of_yaml_configs(arguments, tmp_path):
    def keys_of(*options):
        output = tmp_path / options[0]
        run(*options, *arguments, f"train.output_dir={output}")
        return OmegaConf.load(output / "config.yaml").train

    assert keys_of("--budget", "20").memfit.budget_gb == 20
    assert keys_of("--card", "24GB").memfit.preset == "24GB"
    keys = keys_of("--fit", "--budget", "20")
    assert keys.memfit.plan.enabled
    assert keys.memfit.budget_gb == 20


def test_techniques_are_applied(arguments, tmp_path, log):
    keys = ["matching.chunk_size=100", "checkpoint.modules=[backbone]", "host.shared_dataset=True"]
    keys += ["evaluation.on_host=True", "monitor.period=1", "monitor.snapshot=True"]
    run(*arguments, *(f"+train.memfit.{key}" for key in keys))
    assert all("memfit/allocated_peak_gb" in m for m in read_metrics(tmp_path / "output")[:2])
    for name in ("ChunkedMatching", "ActivationCheckpointing", "SharedDataset", "EvaluationOnHost"):
        assert f"Technique {name} (exact) is on" in log.text
