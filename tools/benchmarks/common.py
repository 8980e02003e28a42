"""What the benchmarks share: real images, and tables that say where they come from."""

import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.datasets import load_coco_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "projects" / "Coins"))


@contextmanager
def coins(height: int, width: int) -> Iterator[tuple]:
    """Photographs of coins with boxes and masks, all of one size in pixels.

    Yields:
        (dicts, mapper): Detectron2's dataset dicts, and what makes of one the input of a model.
    """
    from make_dataset import make_dataset

    mapper = DatasetMapper(
        is_train=True,
        augmentations=[T.Resize((height, width))],
        image_format="BGR",
        use_instance_mask=True,
        instance_mask_format="bitmask",
    )
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(Path(folder))
        # By a dataset's name the categories are numbered from 0.
        yield load_coco_json(f"{folder}/train.json", f"{folder}/train", "benchmark_coins"), mapper


def machine() -> str:
    """One line about what the figures were measured on."""
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return f"{device}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def markdown_table(header: list, rows: list) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
