# Copyright (c) the d2_memfit developers.
"""The length of a fine-tuning for a number of images."""

import math

__all__ = ["RULE", "SCHEDULE_KEYS", "fine_tuning_schedule", "periods"]

SCHEDULE_KEYS = (
    "SOLVER.MAX_ITER",
    "SOLVER.STEPS",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.CHECKPOINT_PERIOD",
)

# Sources: the images that a run sees in Detectron2's own recipes.
# - Cityscapes/mask_rcnn_R_50_FPN.yaml, which starts from COCO's weights: 24,000 iterations of 8 of
#   2,975 images, 65 epochs. The rate is lowered at three quarters of them.
# - PascalVOC-Detection/faster_rcnn_R_50_FPN.yaml: 18,000 iterations of 16 images, 288,000.
# - COCO's 1x: 90,000 iterations of 16 of 117,266 images, 12.3 epochs.
_EPOCHS = 65
_MOST_IMAGES = 288_000
_LEAST_EPOCHS = 12.3
_LOWERED_AT = 0.75
# From the balloon dataset in Detectron2's Colab tutorial, with 61 images.
_LEAST_ITERATIONS = 300
_WARMUP = 0.1  # largest share of the iterations
_CHECKPOINTS = 10  # in a run, with at least this many iterations between them:
_LEAST_BETWEEN_CHECKPOINTS = 100

RULE = (
    f"{_EPOCHS} epochs as in Detectron2's recipe for Cityscapes, {_MOST_IMAGES:,} images at most "
    f"as for Pascal VOC, {_LEAST_EPOCHS} epochs at least as in COCO's 1x, and "
    f"{_LEAST_ITERATIONS} iterations or more"
)


def fine_tuning_schedule(
    num_images: int, batch: int, warmup_iters: int, checkpoint_period: int
) -> dict[str, object]:
    """Config keys of a fine-tuning schedule; ``RULE`` describes it.

    Args:
        num_images: images in the dataset.
        batch: the effective batch.
        warmup_iters, checkpoint_period: the config's values. They are only shortened.
    """
    images_seen = max(min(_EPOCHS * num_images, _MOST_IMAGES), _LEAST_EPOCHS * num_images)
    max_iter = max(math.ceil(images_seen / batch), _LEAST_ITERATIONS)
    return {"SOLVER.MAX_ITER": max_iter, **periods(max_iter, warmup_iters, checkpoint_period)}


def periods(max_iter: int, warmup_iters: int, checkpoint_period: int) -> dict[str, object]:
    """The rest of the schedule for a number of iterations."""
    return {
        "SOLVER.STEPS": (int(_LOWERED_AT * max_iter),) if max_iter > 2 else (),
        "SOLVER.WARMUP_ITERS": min(warmup_iters, int(_WARMUP * max_iter)),
        "SOLVER.CHECKPOINT_PERIOD": min(
            checkpoint_period, max(max_iter // _CHECKPOINTS, _LEAST_BETWEEN_CHECKPOINTS)
        ),
    }
