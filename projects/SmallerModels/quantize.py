# Copyright (c) the d2_memfit developers.
"""Quantize a trained detector to int8, for inference on a CPU.

    python projects/SmallerModels/quantize.py --config-file output/config.yaml \
        --coco my_train train.json images/ --output output/model_int8.pth [KEY VALUE ...]

PyTorch's post-training static quantization: convolutions and fully connected layers compute in
int8, with scales found on images of DATASETS.TRAIN. Batch norm is folded into convolutions. The
last layers, which predict, and all else stay in float32. To use the result:

    PYTHONPATH=projects/SmallerModels d2-memfit predict --trainer quantize:Trainer \
        --config-file output/config.yaml --weights output/model_int8.pth \
        --input photos/ --output predicted
"""

import argparse
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import prune
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper
from detectron2.layers import FrozenBatchNorm2d
from plain_layers import norm_and_activation, plain_convolution, replace
from torch import nn
from torch.ao import quantization
from torch.nn.utils.fusion import fuse_conv_bn_weights

from d2_memfit.cli.command_line import add_coco_option, files_read
from d2_memfit.cli.train import Trainer as MemfitTrainer
from d2_memfit.common.files import check_outputs, output_file
from d2_memfit.config import load_cfg
from d2_memfit.data import register_coco
from d2_memfit.errors import ConfigError, exit_on_error
from d2_memfit.inference import load_whole_model, weights_of
from d2_memfit.job import find_function

# The last layers decide on classes and boxes. They are small, and rounding shows most in them.
IN_FLOAT = ("predictor", "objectness_logits", "anchor_deltas", "cls_score", "bbox_pred")

Calibration = Callable[[nn.Module], Any]


class Int8Layer(nn.Module):
    """A layer that computes in int8, with what follows it in float32.

    Args:
        layer: becomes int8.
        after: norm and activation.
    """

    def __init__(self, layer: nn.Conv2d, after: list[nn.Module]) -> None:
        super().__init__()
        self.layer = quantization.QuantWrapper(layer)
        self.layer.qconfig = quantization.get_default_qconfig("x86")
        self.after = nn.Sequential(*after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_flat = x.dim() == 2  # of a fully connected layer
        result: torch.Tensor = self.after(self.layer(x[:, :, None, None] if is_flat else x))
        return result.flatten(1) if is_flat else result


def to_int8(model: nn.Module, calibrate: Optional[Calibration] = None) -> nn.Module:
    """Replace a model's layers by int8 ones, in place.

    Args:
        model: in float32, on the CPU.
        calibrate: runs the model that it is given on images. Without it the scales are unknown,
            until weights are loaded.
    """
    model.eval()
    layers: dict[nn.Module, nn.Module] = {
        layer: _prepared(layer)
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and not any(part in name for part in IN_FLOAT)
    }
    replace(model, layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about deprecation, and about scales that are not known
        quantization.prepare(model, inplace=True)
        if calibrate is not None:
            with torch.inference_mode():
                calibrate(model)
        return quantization.convert(model, inplace=True)


def _prepared(layer: Any) -> Int8Layer:
    if isinstance(layer, nn.Linear):
        # As a 1 x 1 convolution, whose int8 weights Detectron2's checkpoints can hold.
        plain = nn.Conv2d(layer.in_features, layer.out_features, 1)
        plain.weight = nn.Parameter(layer.weight.detach()[:, :, None, None])
        plain.bias = layer.bias
    else:
        plain = plain_convolution(layer)
    after = norm_and_activation(layer)
    if after and isinstance(after[0], (nn.BatchNorm2d, FrozenBatchNorm2d)):
        norm: Any = after.pop(0)
        statistics = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        plain.weight, plain.bias = fuse_conv_bn_weights(plain.weight, plain.bias, *statistics)
    if plain.bias is None:  # a checkpoint cannot hold a bias that is not there
        plain.bias = nn.Parameter(plain.weight.new_zeros(plain.out_channels))
    return Int8Layer(plain, after)


class Trainer(MemfitTrainer):
    """Builds the int8 model, for ``d2-memfit predict --trainer quantize:Trainer``."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        if cfg.MODEL.DEVICE != "cpu":
            raise ConfigError(
                f"int8 layers of PyTorch run on a CPU: MODEL.DEVICE cpu, got {cfg.MODEL.DEVICE!r}"
            )
        return to_int8(super().build_model(cfg))


class PrunedTrainer(Trainer, prune.Trainer):
    """Builds the int8 model of a pruned one, for ``--trainer quantize:PrunedTrainer``."""


def quantize(
    cfg: CfgNode, trainer: type[MemfitTrainer], weights: str, num_images: int
) -> nn.Module:
    """A trained model in int8, with scales from the first training images of its config."""
    model = trainer.build_model(cfg).eval()
    load_whole_model(model, weights)
    mapper = DatasetMapper(cfg, is_train=False)
    images = DatasetCatalog.get(cfg.DATASETS.TRAIN[0])[:num_images]

    def calibrate(prepared: nn.Module) -> None:
        for image in images:
            prepared([mapper(image)])

    return to_int8(model, calibrate)


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config-file", required=True, help="the config of the trained model")
    parser.add_argument("--weights", help="its weights (default: the last ones beside the config)")
    parser.add_argument(
        "--trainer",
        default="d2_memfit.cli.train:Trainer",
        metavar="MODULE:CLASS",
        help="the class that trained it; prune:Trainer after prune.py",
    )
    parser.add_argument("--images", type=int, default=32, help="images to find scales on")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    add_coco_option(parser)
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE")
    args = parser.parse_args()
    for dataset in args.coco:
        register_coco(*dataset)
    weights = weights_of(args.config_file, "", args.weights)
    check_outputs([args.output], [weights, *files_read(args)])
    cfg = load_cfg(args.config_file, [*args.opts, "MODEL.DEVICE", "cpu"])
    trainer: Any = find_function(args.trainer, "--trainer")
    model = quantize(cfg, trainer, weights, args.images)
    with output_file(args.output) as file:
        torch.save({"model": model.state_dict()}, file)
    size = args.output.stat().st_size / 2**20
    int8 = PrunedTrainer if issubclass(trainer, prune.Trainer) else Trainer
    words = ["d2-memfit", "predict", "--trainer", f"quantize:{int8.__name__}"]
    words += ["--config-file", args.config_file, "--weights", str(args.output)]
    words += ["--input", "FOLDER", "--output", "predictions", "MODEL.DEVICE", "cpu"]
    path = f"PYTHONPATH={shlex.quote(str(Path(__file__).parent))}:$PYTHONPATH"
    print(f"Written: {args.output} ({size:.1f} MB)")
    print(f"Next, find objects in other images:\n  {path} {shlex.join(words)}")


if __name__ == "__main__":
    main()
