# Copyright (c) the d2_memfit developers.
"""The losses of transformers' detectors, by name, as they enter their sum."""

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from d2_memfit import window_count
from d2_memfit.common.compat import without_ddp
from d2_memfit.common.patching import replaced_functions

from .families import Family

__all__ = ["losses_by_name"]

# Modules in which a loss all-reduces its number of objects.
_REDUCING = ("transformers.loss.loss_lw_detr", "transformers.loss.loss_rf_detr")


def losses_by_name(
    model: nn.Module, family: Family, inputs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Losses with their weights, whose sum is the loss of transformers.

    They are divided by the window's number of objects.

    Args:
        model: of transformers; DDP may be around it.
        inputs: its keyword arguments.
    """
    bare: Any = without_ddp(model)
    with losses_of_images():
        if family.box_class is None:
            with collected_losses(bare.criterion) as losses:
                model(**inputs)
        else:
            losses = model(**inputs).loss_dict
            if bare.config.model_type == "rf_detr":  # the others have weighted theirs
                losses = weighted_losses(losses, bare.config)
    classes = inputs.get("class_labels") or [labels["class_labels"] for labels in inputs["labels"]]
    num_objects = sum(map(len, classes))
    groups = getattr(bare.config, "group_detr", 1)  # of queries, each with all objects
    factor = max(num_objects, 1 / groups) / window_count(num_objects)
    # The class loss of Mask2Former is a mean over queries.
    return {n: v if n.startswith("loss_cross_entropy") else v * factor for n, v in losses.items()}


@contextmanager
def collected_losses(criterion: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While open, the dict gets a criterion's losses, of which its model returns only the sum.

    The model weights these tensors in place.
    """
    losses: dict[str, Tensor] = {}
    hook = criterion.register_forward_hook(lambda module, args, output: losses.update(output))
    try:
        yield losses
    finally:
        hook.remove()


def weighted_losses(losses: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Losses of RF-DETR with their weights in the sum."""
    weights = {
        "loss_ce": config.class_loss_coefficient,
        "loss_bbox": config.bbox_loss_coefficient,
        "loss_giou": config.giou_loss_coefficient,
        "loss_mask_ce": getattr(config, "mask_class_loss_coefficient", 0),
        "loss_mask_dice": getattr(config, "mask_dice_loss_coefficient", 0),
    }
    names = {name: re.sub(r"(_\d+|_enc)$", "", name) for name in losses}
    # The mask losses are tensors without elements where there are no objects.
    return {n: loss.sum() * weights[names[n]] for n, loss in losses.items() if names[n] in weights}


@contextmanager
def losses_of_images() -> Iterator[None]:
    """While open, losses and matchers of transformers depend only on their own images.

    They do not communicate with other ranks: the number of objects is the batch's. RF-DETR's
    matcher with masks takes one image at a time, and samples points by the size of its masks, as
    rfdetr's does. In transformers 5.23 it takes the boxes' shape for that of the masks. Points then
    grow with the batch, memory with its square, and an image's match depends on its batch.
    """
    files = [importlib.import_module(name) for name in _REDUCING]
    replacements: dict[str, Any] = {
        "_is_torch_distributed_initialized": lambda original: lambda: False,
        "RfDetrHungarianMatcher": _image_by_image,
    }
    with replaced_functions((files, replacements)):
        yield


def _image_by_image(matcher: type[nn.Module]) -> type[nn.Module]:
    class ImageByImage(matcher):  # type: ignore[misc, valid-type]
        mask_point_sample_ratio: int

        def forward(
            self, outputs: Mapping[str, Tensor], targets: Sequence[Any], group_detr: int
        ) -> list[Any]:
            # It takes 4 x queries // ratio points, where it should pixels of a mask // ratio.
            pixels_per_point = self.mask_point_sample_ratio
            num_points = max(outputs["pred_masks"][0, 0].numel() // pixels_per_point, 1)
            num_taken = 4 * outputs["pred_boxes"].shape[1]
            self.mask_point_sample_ratio = max(round(num_taken / num_points), 1)
            indices = []
            for i, target in enumerate(targets):
                image = {
                    name: outputs[name][i : i + 1]
                    for name in ("logits", "pred_boxes", "pred_masks")
                }
                indices += super().forward(image, [target], group_detr)
            self.mask_point_sample_ratio = pixels_per_point
            return indices

    return ImageByImage
