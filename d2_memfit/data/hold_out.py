# Copyright (c) the d2_memfit developers.
"""Division of a dataset into images to train on and images that are held out."""

import json
import os
import random
from pathlib import Path

from ..common.errors import ConfigError
from ..common.files import check_outputs, output_file
from .coco_file import check_coco_file

__all__ = ["hold_out"]


def hold_out(coco: list[list[str]], share: float, folder: str, resume: bool) -> list[list[str]]:
    """Write ``train.json`` and ``val.json``, with the images of ``--coco`` in two parts.

    The parts are the same each time, so each rank of torchrun may write them.

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
    images = sorted(content["images"], key=lambda image: image["file_name"])
    random.Random(0).shuffle(images)
    number = int(share * len(images)) if 0 < share < 1 else 0
    if not number:
        why = f"{share:g} of {len(images)} images leaves a part without images"
        raise ConfigError(f"--hold-out {why}: name a share between 0 and 1, such as 0.2")
    for file, of_part in zip(files, (images[number:], images[:number])):
        ids = {image["id"] for image in of_part}
        annotations = [a for a in content["annotations"] if a["image_id"] in ids]
        text = json.dumps({**content, "images": of_part, "annotations": annotations})
        if not (file.is_file() and file.read_text() == text):
            if os.path.lexists(file):  # if not, another rank may write it now
                check_outputs([file], [json_file])
            with output_file(file, "w") as f:
                f.write(text)
    return parts
