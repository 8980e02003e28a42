# Copyright (c) the d2_memfit developers.
"""Division of a dataset into images to train on and images that are held out."""

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.files import check_outputs, output_file
from ..errors import ConfigError
from .coco_file import check_coco_file

__all__ = ["hold_out"]


def hold_out(
    coco: Sequence[Sequence[str]], share: float, folder: str, resume: bool
) -> list[list[str]]:
    """Write ``train.json`` and ``val.json``, with the images of ``--coco`` in two parts.

    The parts are the same each time, so each rank of torchrun may write them. They have about the
    same share of each class.

    Args:
        coco: values of ``--coco``.
        share: share of the images in ``val.json``.
        folder: OUTPUT_DIR, which is created if necessary.
        resume: whether files in the folder are taken as they are.

    Returns:
        Values of ``--coco`` for the two files.

    Raises:
        ConfigError: a part would be empty, there is not one dataset, or a file of the user's would
            be replaced.
    """
    if len(coco) != 1:
        raise ConfigError(f"--hold-out divides one dataset, but there are {len(coco)} --coco")
    ((name, json_file, image_dir),) = coco
    files = [Path(folder, f"{part}.json") for part in ("train", "val")]
    parts = [[f"{name}_{file.stem}", str(file), image_dir] for file in files]
    if resume and all(file.is_file() for file in files):
        return parts
    content = check_coco_file(name, json_file, None, for_training=False).content
    images = _in_order(content)
    is_share = 0 < share < 1
    held = {i for n, i in enumerate(images) if is_share and int((n + 1) * share) > int(n * share)}
    if not held:
        raise ConfigError(
            f"--hold-out {share:g} of {len(images)} images leaves a part without images: name a "
            "share between 0 and 1, such as 0.2"
        )
    for file, ids in zip(files, (set(images) - held, held)):
        of_part = {"images": [image for image in content["images"] if image["id"] in ids]}
        of_part["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids]
        text = json.dumps({**content, **of_part})
        if file.is_file() and file.read_text() == text:
            continue
        if os.path.lexists(file):
            check_outputs([file], [json_file])
        with output_file(file, "w") as f:
            f.write(text)
    return parts


def _in_order(coco: dict[str, Any]) -> list[Any]:
    """Ids of all images, drawn in the same order each time, and then by their rarest class."""
    numbers = Counter(a["category_id"] for a in coco["annotations"])
    rarest: dict[Any, tuple[int, str]] = {}
    for a in coco["annotations"]:
        one = numbers[a["category_id"]], str(a["category_id"])
        rarest[a["image_id"]] = min(one, rarest.get(a["image_id"], one))
    images = sorted(coco["images"], key=lambda image: image["file_name"])
    random.Random(0).shuffle(images)
    return sorted((i["id"] for i in images), key=lambda i: rarest.get(i, (0, "")))
