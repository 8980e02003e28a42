# Copyright (c) the d2_memfit developers.
"""Division of a dataset into images to train on and images that are held out."""

import random
from collections import Counter
from typing import Any

from ..errors import ConfigError
from .label_files import Split

__all__ = ["hold_out"]


def hold_out(split: Split, share: float) -> list[Split]:
    """Divide a split by images into "train" and "val".

    The same images are held out each time, whatever their order in the file. Those of rare classes
    are drawn first, so that a class with ``1 / share`` images or more is in both splits. No class
    loses its last image to "val".

    Raises:
        ConfigError: a split would be empty.
    """
    coco = split.coco
    images = sorted(coco["images"], key=lambda image: image["file_name"])
    random.Random(0).shuffle(images)
    # The class None stands for all images, and comes last.
    classes: dict[Any, set[Any]] = {image["id"]: {None} for image in images}
    for annotation in coco["annotations"]:
        classes[annotation["image_id"]].add(annotation["category_id"])
    total = Counter(c for of_image in classes.values() for c in of_image)
    held: set[Any] = set()
    num_held: Counter[Any] = Counter()
    for c in sorted(total, key=lambda c: (c is None, total[c], str(c))):
        for image, of_image in classes.items():
            is_wanted = c in of_image and num_held[c] + 1 <= share * total[c]
            stays = all(num_held[k] + 1 < total[k] for k in of_image)  # each class in train, too
            if is_wanted and stays and image not in held:
                held.add(image)
                num_held.update(of_image)
    if not held or not 0 < share < 1:
        raise ConfigError(
            f"--hold-out {share:g} of {len(images)} images leaves a split without images: name a "
            "share between 0 and 1, such as 0.2"
        )
    splits = []
    for name, ids in (("train", classes.keys() - held), ("val", held)):
        chosen = {
            "images": [image for image in coco["images"] if image["id"] in ids],
            "annotations": [a for a in coco["annotations"] if a["image_id"] in ids],
        }
        splits.append(Split(name, {**coco, **chosen}, split.image_dir))
    splits[0].notes.update(split.notes)
    return splits
