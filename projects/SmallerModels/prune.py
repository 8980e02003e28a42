# Copyright (c) the d2_memfit developers.
"""Remove channels of a trained detector, and train what is left.

    python projects/SmallerModels/prune.py --config-file output/config.yaml --ratio 0.5 \
        --coco my_train train.json images/ --coco my_val val.json images/ OUTPUT_DIR output/pruned

It needs ``pip install torch-pruning``, whose DepGraph (Fang et al., arXiv:2301.12900) removes from
each group of layers the channels with the smallest weights. These are channels of the backbone, of
FPN inside, and of the box head. FPN's outputs keep their channels. OUTPUT_DIR gets ``pruned.pth``,
the training's checkpoints, and a config. To use the result:

    PYTHONPATH=projects/SmallerModels d2-memfit predict --trainer prune:Trainer \
        --config-file output/pruned/config.yaml --input photos/ --output predicted
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import FPN
from detectron2.modeling.roi_heads import FastRCNNConvFCHead
from plain_layers import norm_and_activation, plain_convolution, replace
from torch import nn

from d2_memfit.cli.command_line import files_read
from d2_memfit.cli.train import Trainer as MemfitTrainer
from d2_memfit.cli.train import argument_parser, run
from d2_memfit.common.files import check_outputs, check_run_folder, output_file
from d2_memfit.config import load_cfg
from d2_memfit.data import check_datasets, register_coco
from d2_memfit.engine import usable_device
from d2_memfit.errors import ConfigError, exit_on_error
from d2_memfit.inference import load_whole_model, weights_of

_MULTIPLE = 8  # channels are removed by so many, which keeps vector units busy
_SIDE = 128  # of the image that finds which layers depend on each other, in pixels


def prune(model: nn.Module, ratio: float) -> None:
    """Remove the channels with the smallest weights, in place.

    Args:
        model: a detector with FPN, whose norms are batch norm.
        ratio: share of the channels to remove from each layer.

    Raises:
        ConfigError: torch-pruning is missing, or the model cannot be pruned.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise ConfigError(
            f"pruning needs an extra package ({error}): pip install torch-pruning"
        ) from error
    if not 0 < ratio < 1:
        raise ConfigError(f"--ratio must be between 0 and 1, got {ratio}")
    backbone: Any = model.backbone
    if not isinstance(backbone, FPN):
        raise ConfigError(f"pruning needs a backbone with FPN, got {type(backbone).__name__}")
    for module in backbone.modules():
        if isinstance(module, (FrozenBatchNorm2d, nn.GroupNorm)):
            raise ConfigError(
                f"pruning needs batch norm, got {type(module).__name__}: set MODEL.RESNETS.NORM "
                "and MODEL.FPN.NORM to BN. Weights of FrozenBN load into it"
            )
    model.requires_grad_(True)  # how layers depend on each other is read from gradients
    plain: dict[Any, nn.Sequential] = {
        layer: nn.Sequential(plain_convolution(layer), *norm_and_activation(layer))
        for layer in backbone.modules()
        if norm_and_activation(layer)
    }
    replace(backbone, plain)
    device = next(model.parameters()).device
    image = torch.zeros(1, 3, _SIDE, _SIDE, device=device)
    kept = [*backbone.output_convs, *([backbone.top_block] if backbone.top_block else [])]
    parts: list[tuple[nn.Module, torch.Tensor, list[nn.Module]]] = [(backbone, image, kept)]
    roi_heads: Any = getattr(model, "roi_heads", None)
    if isinstance(getattr(roi_heads, "box_head", None), FastRCNNConvFCHead):
        box_head = roi_heads.box_head
        channels = backbone.output_shape()[roi_heads.box_in_features[0]].channels
        regions = torch.zeros(2, channels, *roi_heads.box_pooler.output_size, device=device)
        parts.append((box_head, regions, [box_head.fcs[-1]]))
    for part, example, unpruned in parts:
        torch_pruning.pruner.BasePruner(
            part,
            example,
            importance=torch_pruning.importance.GroupMagnitudeImportance(),
            pruning_ratio=ratio,
            ignored_layers=unpruned,
            round_to=_MULTIPLE,
        ).step()
    for layer, layers in plain.items():
        layer.weight = layers[0].weight
        layer.bias = layers[0].bias
        _note_channels(layer)
    replace(backbone, {layers: layer for layer, layers in plain.items()})


def shrink(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Give the layers of a model the shapes of a pruned model's parameters, in place.

    The values are undefined until weights are loaded.

    Args:
        shapes: by the parameter's name.
    """
    for name, layer in model.named_modules():
        for key, tensor in [
            *layer.named_parameters(recurse=False),
            *layer.named_buffers(recurse=False),
        ]:
            shape = shapes.get(f"{name}.{key}", tensor.shape)
            if shape == tensor.shape:
                continue
            new = tensor.new_zeros(shape)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(layer, key, nn.Parameter(new, tensor.requires_grad) if is_parameter else new)
        _note_channels(layer)


def _note_channels(layer: Any) -> None:
    """Set the attributes of a layer that must agree with the shape of its weight."""
    if isinstance(layer, nn.Conv2d):
        if layer.groups > 1 and layer.groups == layer.out_channels:
            layer.groups = len(layer.weight)  # depthwise
        layer.out_channels = len(layer.weight)
        layer.in_channels = layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.BatchNorm2d):
        layer.num_features = len(layer.weight)


class Trainer(MemfitTrainer):
    """Builds the model in the shapes of the pruned weights that MODEL.WEIGHTS names."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        if not Path(cfg.MODEL.WEIGHTS).is_file():
            raise ConfigError(
                f"MODEL.WEIGHTS must name the pruned weights, pruned.pth, got {cfg.MODEL.WEIGHTS!r}"
            )
        model: nn.Module = super().build_model(cfg)
        weights = torch.load(cfg.MODEL.WEIGHTS, map_location="cpu", weights_only=True, mmap=True)
        shrink(model, {name: value.shape for name, value in weights["model"].items()})
        return model


def write_pruned(cfg: CfgNode, ratio: float, file: Path) -> None:
    """Prune the trained model of a config, and write its weights to a file."""
    model = MemfitTrainer.build_model(cfg)
    load_whole_model(model, cfg.MODEL.WEIGHTS)
    before = sum(p.numel() for p in model.parameters())
    prune(model, ratio)
    after = sum(p.numel() for p in model.parameters())
    with output_file(file) as opened:
        torch.save({"model": model.state_dict()}, opened)
    print(f"Written: {file} ({after / 1e6:.2f} of {before / 1e6:.2f} million parameters)")


@exit_on_error
def main() -> None:
    parser = argument_parser()
    parser.epilog = __doc__
    parser.add_argument(
        "--weights",
        help="weights of the trained model (default: the last ones beside its config)",
    )
    parser.add_argument("--ratio", type=float, default=0.5, help="share of channels to remove")
    args = parser.parse_args()
    weights = weights_of(args.config_file, "", args.weights)
    args.opts += ["MODEL.WEIGHTS", weights]
    for dataset in args.coco:
        register_coco(*dataset)
    cfg = load_cfg(args.config_file, args.opts)
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE, "MODEL.DEVICE" in args.opts[::2])
    # Before it takes the time to prune.
    pruned = Path(cfg.OUTPUT_DIR) / "pruned.pth"
    check_outputs([pruned], [weights, *files_read(args)])
    check_run_folder(cfg.OUTPUT_DIR, files_read(args))
    check_datasets(cfg, args.eval_only)
    write_pruned(cfg, args.ratio, pruned)
    args.opts += ["MODEL.WEIGHTS", str(pruned)]
    run(args, Trainer)


if __name__ == "__main__":
    main()
