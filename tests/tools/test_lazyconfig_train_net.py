"""tools/lazyconfig_train_net.py with a config made of Detectron2's own parts."""

import lazyconfig_train_net
import pytest
import torch
from detectron2.engine import default_argument_parser
from tiny import read_metrics

CONFIG = """
import detectron2.data.transforms as T
from detectron2.config import LazyCall as L
from detectron2.data import DatasetMapper, build_detection_train_loader
from detectron2.data import get_detection_dataset_dicts
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler
import torch
from tiny import tiny_cfg, tiny_model

model = L(tiny_model)(cfg=L(tiny_cfg)(family="faster_rcnn"))
dataloader = dict(
    train=L(build_detection_train_loader)(
        dataset=L(get_detection_dataset_dicts)(names="coins_train"),
        mapper=L(DatasetMapper)(
            is_train=True, augmentations=[L(T.ResizeShortestEdge)(short_edge_length=64)],
            image_format="BGR",
        ),
        total_batch_size=2,
        num_workers=0,
    )
)
optimizer = L(torch.optim.SGD)(
    params=L(get_default_optimizer_params)(base_lr=0.01), lr=0.01, momentum=0.9
)
lr_multiplier = L(CosineParamScheduler)(start_value=1.0, end_value=0.1)
train = dict(
    output_dir="", init_checkpoint="", max_iter=2, amp=dict(enabled=False), ddp=dict(),
    checkpointer=dict(period=100), eval_period=0, log_period=1, device="cuda",
)
"""


def run(tmp_path, *overrides):
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    output = f"train.output_dir={tmp_path / 'output'}"
    parser = default_argument_parser()
    lazyconfig_train_net.main(parser.parse_args(["--config-file", str(config), output, *overrides]))
    return tmp_path / "output"


def test_accumulation_and_mixed_precision(coins, tmp_path):
    output = run(
        tmp_path,
        "train.accumulation_steps=3",
        "train.amp.enabled=True",
        "train.amp.dtype=bfloat16",
    )
    assert [m["effective_batch"] for m in read_metrics(output)] == [6, 6]
    checkpoint = torch.load(output / "model_final.pth", weights_only=True)
    assert checkpoint["trainer"]["optimizer"]["state"]


@pytest.mark.parametrize(("key", "value"), [("accumulation_steps", 0), ("micro_batch", 1.5)])
def test_bad_numbers_are_one_line(tmp_path, capsys, key, value):
    with pytest.raises(SystemExit) as e:
        run(tmp_path, f"train.{key}={value}")
    assert e.value.code == 2
    message = f"error: train.{key} must be a positive integer, got {value}\n"
    assert capsys.readouterr().err == message
    assert not (tmp_path / "output").exists()
