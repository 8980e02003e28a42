#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Prune, quantize or distill, and compare the result with the run before.

    python projects/SmallerModels/smaller.py --way WAY --config-file output/before/config.yaml \
        --coco my_train train.json images/ --coco my_val val.json images/ \
        OUTPUT_DIR output/after [KEY VALUE ...]

output/before is the OUTPUT_DIR of the run before, which used the same names of datasets.

- prune: torch-pruning's DepGraph (Fang et al., arXiv:2301.12900) removes the channels with the
  smallest weights from the run's model. What is left is trained.
- quantize: ONNX Runtime's static quantization writes the backbone of the run's model in int8.
- distill: the model is trained with the features of DISTILLATION.TEACHER_CONFIG, by channel-wise
  knowledge distillation (Shu et al., ICCV 2021, arXiv:2011.13256).
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from backbones import Trainer
from detectron2.config import CfgNode
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from d2_memfit.cli.command_line import argument_parser
from d2_memfit.cli.train import train
from d2_memfit.common.errors import ConfigError, exit_on_error
from d2_memfit.common.files import check_outputs, output_file
from d2_memfit.config.load import load_cfg
from d2_memfit.data.registration import register_coco
from d2_memfit.memory import TensorMeter
from d2_memfit.predict.predictor import load_whole_model


def add_distillation_config(cfg: CfgNode) -> None:
    """Add the keys of distillation."""
    cfg.DISTILLATION = CfgNode()
    # Config of the teacher: a file, or a name in the model zoo.
    cfg.DISTILLATION.TEACHER_CONFIG = ""
    # Trained weights of the teacher. Estimates and plans do not need them.
    cfg.DISTILLATION.TEACHER_WEIGHTS = ""
    # The loss is a mean over levels, images and channels.
    cfg.DISTILLATION.LOSS_WEIGHT = 10.0


def channel_wise_loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Divergence of two features [channels, height, width]: equation 4 of the paper."""
    logs = [features.float().flatten(1).log_softmax(1) for features in (student, teacher)]
    return F.kl_div(logs[0], logs[1], reduction="sum", log_target=True) / len(student)


class Distilled(nn.Module):
    """A mixin for meta-architectures: in training, ``loss_distillation`` is one of the losses.

    Attributes:
        teacher: a frozen model whose backbone runs. Checkpoints leave it out. Its ``flips`` says
            whether it has BGR and the student RGB, or the other way round.
    """

    backbone: nn.Module
    teacher: Any

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {key: value for key, value in state.items() if not key.startswith("teacher.")}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        own = {f"teacher.{key}": value for key, value in self.teacher.state_dict().items()}
        return super().load_state_dict({**own, **state_dict}, *args, **kwargs)

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        if not self.training:
            return super().forward(batched_inputs)
        self.teacher.eval()
        images = [image["image"] for image in batched_inputs]
        with torch.no_grad():  # first, while the student has no activations
            own = [{"image": image.flip(0) if self.teacher.flips else image} for image in images]
            targets = self.teacher.backbone(self.teacher.preprocess_image(own).tensor)
        features: dict[str, torch.Tensor] = {}
        with self.backbone.register_forward_hook(lambda _, x, outputs: features.update(outputs)):
            losses = super().forward(batched_inputs)
        terms = []
        for level, shape in self.teacher.backbone.output_shape().items():
            for number, image in enumerate(images):
                # Without padding, which depends on the other images of the micro-batch.
                height, width = (-(-side // shape.stride) for side in image.shape[-2:])
                both = (f[level][number, :, :height, :width] for f in (features, targets))
                terms.append(channel_wise_loss(*both))
        losses["loss_distillation"] = self.teacher.loss_weight * torch.stack(terms).mean()
        return losses


class DistillingTrainer(Trainer):
    """Trains a student with its teacher."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        model: Any = super().build_model(cfg)
        own = ["MODEL.DEVICE", cfg.MODEL.DEVICE]
        teacher_cfg = load_cfg(cfg.DISTILLATION.TEACHER_CONFIG, own, [add_distillation_config])
        teacher: Any = Trainer.build_model(teacher_cfg).requires_grad_(False)
        for part in {name for name, _ in teacher.named_children()} - {"backbone"}:
            delattr(teacher, part)
        if model.backbone.output_shape() != teacher.backbone.output_shape():
            raise ConfigError("DISTILLATION.TEACHER_CONFIG must have the student's MODEL.FPN")
        model.__class__ = type("Distilled" + type(model).__name__, (Distilled, type(model)), {})
        model.teacher = teacher
        teacher.flips = cfg.INPUT.FORMAT != teacher_cfg.INPUT.FORMAT
        teacher.loss_weight = cfg.DISTILLATION.LOSS_WEIGHT
        return model

    def resume_or_load(self, resume: bool = True) -> None:
        model: Any = getattr(self.model, "module", self.model)
        load_whole_model(model.teacher, self.cfg.DISTILLATION.TEACHER_WEIGHTS)
        super().resume_or_load(resume)


class _Split(nn.Module):
    """One of Detectron2's convolutions, with its norm and activation as steps of their own."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for step in (self.convolution, self.norm, self.activation):
            x = x if step is None else step(x)
        return x


def prune(backbone: Any, ratio: float) -> None:
    """Remove a share of the channels of a ResNet, and of FPN inside, in place.

    Raises:
        ConfigError: the backbone has norms other than batch norm.
    """
    import torch_pruning

    if any(isinstance(m, (FrozenBatchNorm2d, nn.GroupNorm)) for m in backbone.modules()):
        raise ConfigError("MODEL.RESNETS.NORM and MODEL.FPN.NORM must be BN to prune a model")
    backbone.requires_grad_(True)  # torch-pruning follows gradients
    layers: list[Any] = [layer for layer in backbone.modules() if isinstance(layer, Conv2d)]
    for layer in layers:
        shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
        convolution = nn.Conv2d(layer.in_channels, layer.out_channels, *shape)
        convolution.weight, convolution.bias = layer.weight, layer.bias
        layer.__class__, layer.convolution = _Split, convolution
    torch_pruning.pruner.BasePruner(
        backbone,
        torch.zeros(1, 3, 128, 128),
        torch_pruning.importance.GroupMagnitudeImportance(),
        pruning_ratio=ratio,
        ignored_layers=[*backbone.output_convs, backbone.top_block],
        round_to=8,  # which keeps vector units busy
    ).step()
    for layer in layers:
        layer.__class__ = Conv2d
        for name in ("weight", "bias", "in_channels", "out_channels"):
            setattr(layer, name, getattr(layer.convolution, name))
        del layer.convolution


def quantize(cfg: CfgNode, model: Any, images: Any, folder: Path) -> None:
    """Write a model in int8: the backbone, the weights of the rest, and a config.

    Args:
        images: batches of one image. Scales are found on the first 32.
    """
    from onnxruntime import quantization

    names = ("backbone.onnx", "model_final.pth", "config.yaml")
    backbone, rest, config = files = [folder / name for name in names]
    check_outputs(files)
    inputs = [model.preprocess_image(image).tensor for _, image in zip(range(32), images)]
    with output_file(backbone) as file:
        torch.onnx.export(
            model.backbone.eval(),
            (inputs[0],),
            file.name,
            input_names=["x"],
            output_names=[*model.backbone(inputs[0])],
            dynamic_axes={"x": {0: "images", 2: "height", 3: "width"}},
            dynamo=False,  # which has fixed sizes
        )
        feeds = iter([{"x": x.numpy()} for x in inputs])
        reader = SimpleNamespace(get_next=lambda: next(feeds, None))
        # ONNX Runtime would clip the input of this node, RetinaNet's p6, which is an output too.
        options = {"per_channel": True, "nodes_to_exclude": ["/top_block/Relu"]}
        quantization.quantize_static(file.name, file.name, reader, **options)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("backbone.")}
    with output_file(rest) as file:
        torch.save({"model": state}, file)
    cfg.OUTPUT_DIR = str(folder)
    with output_file(config, "w") as file:
        file.write(cfg.dump())


class SmallerTrainer(Trainer):
    """Builds models in the shapes of ``pruned.pth``, and with ``backbone.onnx`` of OUTPUT_DIR."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        model: Any = super().build_model(cfg)
        if cfg.MODEL.WEIGHTS.endswith("pruned.pth"):
            weights = torch.load(cfg.MODEL.WEIGHTS, "cpu", weights_only=True)["model"]
            for name, tensor in model.state_dict(keep_vars=True).items():
                if name in weights:
                    tensor.data = tensor.new_zeros(weights[name].shape)
        file = Path(cfg.OUTPUT_DIR, "backbone.onnx")
        if not file.is_file():
            return model
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file, options)
        names = [output.name for output in session.get_outputs()]

        def forward(x: torch.Tensor) -> dict[str, torch.Tensor]:
            return dict(zip(names, map(torch.from_numpy, session.run(None, {"x": x.numpy()}))))

        for part in [name for name, _ in model.backbone.named_children()]:
            delattr(model.backbone, part)
        model.backbone.forward = forward
        return model


def load_run(trainer: type[Trainer], folder: Path) -> tuple[CfgNode, Any]:
    """The config and the trained model of a run."""
    opts = ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder)]
    cfg = load_cfg(str(folder / "config.yaml"), opts, [add_distillation_config])
    model = trainer.build_model(cfg)
    load_whole_model(model, str(folder / "model_final.pth"))
    return cfg, model


def row(trainer: type[Trainer], folder: Path) -> str:
    """Measure the model of a run."""
    seed_all_rng(0)  # for the same batch in training
    cfg, model = load_run(trainer, folder)
    in_int8 = [file.stat().st_size for file in folder.glob("*.onnx")]
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values()) + sum(in_int8)
    images = list(trainer.build_test_loader(cfg, cfg.DATASETS.TEST[0]))
    began = time.process_time()
    with torch.inference_mode():
        outputs = [model.eval()(image) for image in images]
    seconds = (time.process_time() - began) / len(outputs)
    ap = trainer.test(cfg, model)["bbox"]["AP"]
    cells = [f"{size / 2**20:.1f}", f"{1000 * seconds:.0f}", f"{ap:.1f}"]
    if not in_int8:
        with TensorMeter() as meter, EventStorage():
            sum(model.train()(next(iter(trainer.build_train_loader(cfg)))).values()).backward()
        number = sum(p.numel() for n, p in model.named_parameters() if "teacher." not in n)
        cells += [f"{number / 1e6:.2f}", f"{meter.peak_bytes / 2**20:.0f}"]
    return " | ".join([f"| {folder.name}", *cells]) + " |"


@exit_on_error
def main() -> None:
    parser = argument_parser()
    parser.epilog = __doc__
    parser.add_argument("--way", choices=("prune", "quantize", "distill"), required=True)
    parser.add_argument("--ratio", type=float, default=0.5, help="share of channels to remove")
    args = parser.parse_args()
    before = Path(args.config_file).parent
    after = Path(load_cfg(args.config_file, args.opts, [add_distillation_config]).OUTPUT_DIR)
    trainer = DistillingTrainer if args.way == "distill" else SmallerTrainer
    for dataset in args.coco:
        register_coco(*dataset)
    cfg, model = load_run(SmallerTrainer, before)
    if args.way == "quantize":
        images = SmallerTrainer.build_test_loader(cfg, cfg.DATASETS.TRAIN[0])
        quantize(cfg, model, images, after)
    else:
        if args.way == "prune":
            pruned = after / "pruned.pth"
            check_outputs([pruned])
            prune(model.backbone, args.ratio)
            with output_file(pruned) as file:
                torch.save({"model": model.state_dict()}, file)
            args.opts += ["MODEL.WEIGHTS", str(pruned)]
        train(args, trainer, [add_distillation_config])
    print("| run | MB | CPU ms an image | box AP | million parameters | MB of a training step |")
    print(row(SmallerTrainer, before), row(trainer, after), sep="\n")


if __name__ == "__main__":
    main()
