#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Prepare the measurement of a card that is there for a few minutes, on any machine: README.md.

    .venv/bin/python tools/gpu_call/prepare.py --device h100 --detectron2 FOLDER

It makes two folders in the checkout, which git ignores. ``.site`` has the packages that a machine
with PyTorch may lack. ``.gpu`` has images, a plan, and all estimates, so that nothing waits for
them there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[2]
SITE, FOLDER = ROOT / ".site", ROOT / ".gpu"
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import make_venv  # noqa: E402

MOST_MIB = 64  # of both folders, as far as they travel in one piece
WHEELS = ("bitsandbytes", "hydra-core", "iopath", "omegaconf", "pycocotools", "termcolor", "yacs")
SOURCES = ("antlr4-python3-runtime", "fvcore")  # pure Python, without wheels
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
CONFIG = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"

# .pth files are not read in folders of PYTHONPATH. The machine may have a sitecustomize of its own.
SITECUSTOMIZE = """
import importlib.machinery, importlib.util, os, sys
import detectron2_aliases
here = os.path.dirname(os.path.realpath(__file__))
others = [path for path in sys.path if os.path.realpath(path or ".") != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", required=True, help="the card's device file, such as h100")
    parser.add_argument(
        "--detectron2", type=Path, metavar="FOLDER", help="a checkout of it (default: v0.6)"
    )
    parser.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    parser.add_argument(
        "--cuda", default="130", help="version there, for bitsandbytes (default: 130)"
    )
    args = parser.parse_args()
    for folder in (SITE, FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    make_site(args.detectron2, args.python, args.cuda)
    make_data(FOLDER)
    make_plan(FOLDER, args.device)
    estimate(args.device)
    sizes = [f.stat().st_size for folder in (SITE, FOLDER) for f in folder.rglob("*")]
    print(f"{SITE} and {FOLDER}: {sum(sizes) / 2**20:.0f} MiB in {len(sizes)} files")
    if sum(sizes) > MOST_MIB * 2**20:
        sys.exit(f"error: they have more than {MOST_MIB} MiB")


def make_site(detectron2: Optional[Path], python: str, cuda: str) -> None:
    """Unpack wheels for another Python, and Detectron2 without its compiled operators."""
    lines = make_venv.REQUIREMENTS.read_text().splitlines()
    pins = {line.partition("==")[0]: line.partition(";")[0].split("#")[0].strip() for line in lines}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    there = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for platform in PLATFORMS:
        there += ["--platform", f"{platform}_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        wheels = [*(pins[name] for name in WHEELS), "timm"]  # Detectron2's ViT imports the last
        make_venv.run(*pip, "download", "--no-deps", *there, "-d", folder, *wheels)
        made = [pins[name] for name in SOURCES]
        make_venv.run(*pip, "wheel", "--no-deps", "-w", folder, *made)
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(SITE)
        make_venv.copy_detectron2(detectron2 or make_venv.archive_of_v06(pip, folder), SITE)
    for library in SITE.glob("bitsandbytes/libbitsandbytes_*"):
        if not library.stem.endswith((f"_cuda{cuda}", "_cpu")):
            library.unlink()
    shutil.copy(make_venv.DETECTRON2_ALIASES, SITE)
    (SITE / "sitecustomize.py").write_text(SITECUSTOMIZE)


def make_data(folder: Path) -> None:
    """Make COCO files of noise: "train" is like "ordinary", with two crowded images more."""
    import numpy as np
    from PIL import Image

    (folder / "images").mkdir()
    random = np.random.default_rng(0)
    for name, number in (("ordinary", 24), ("train", 24), ("val", 4)):
        images: list[dict[str, Any]] = []
        objects: list[dict[str, Any]] = []
        for i in range(1, number + 1):
            is_crowded = name == "train" and i % 12 == 6
            width, height = (1344, 800) if is_crowded else (1088, 800)
            file = f"{name}{i}.jpg"
            noise = random.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
            picture = Image.fromarray(noise).resize((width, height))
            picture.save(folder / "images" / file, quality=60)
            images.append({"id": i, "file_name": file, "width": width, "height": height})
            for _ in range(250 if is_crowded else 8):
                w, h = random.integers(20, 200, 2).tolist()
                x, y = (int(random.integers(0, most)) for most in (width - w, height - h))
                objects.append(
                    {
                        **{"id": len(objects) + 1, "image_id": i, "iscrowd": 0, "area": w * h},
                        **{"category_id": 1 + len(objects) % 3, "bbox": [x, y, w, h]},
                        "segmentation": [[x, y, x + w, y, x + w, y + h, x, y + h]],
                    }
                )
        categories = [{"id": k, "name": f"thing{k}"} for k in (1, 2, 3)]
        content = {"images": images, "annotations": objects, "categories": categories}
        (folder / f"{name}.json").write_text(json.dumps(content))


def make_plan(folder: Path, device: str, budget: Sequence[str] = ("MEMFIT.PRESET", "6GB")) -> None:
    """Plan a training of "train" by the objects of "ordinary".

    Args:
        budget: config keys, and their values.
    """
    plan = folder / "plan.yaml"
    command = ["-m", "d2_memfit", "plan", "--config-file", CONFIG]
    for part in ("ordinary", "val"):
        command += ["--coco", f"my_{part}", str(folder / f"{part}.json"), str(folder / "images")]
    command += ["--device", device, "--output", str(plan), "SOLVER.IMS_PER_BATCH", "8", *budget]
    subprocess.run([sys.executable, *command], check=True, env=environment())
    plan.write_text(plan.read_text().replace("my_ordinary", "my_train"))


def estimate(device: str) -> None:
    """Make the estimates of measure-gpu, and those of some items with ordinary segments."""
    from d2_memfit.measure.worker import Worker
    from gpu_call.items import ITEMS_OF_ORDINARY, ORDINARY

    with tempfile.TemporaryDirectory() as folder:  # .site's other packages are for another Python
        os.symlink(SITE / "detectron2", Path(folder, "detectron2"))
        os.symlink(SITE / "timm", Path(folder, "timm"))
        env = environment(folder)
        output = ["--output", str(FOLDER / "card")]
        measure = [sys.executable, "-m", "d2_memfit", "measure-gpu", "--estimate", device]
        subprocess.run([*measure, *output], check=True, env=env)
        worker = [sys.executable, "-m", "d2_memfit.measure.jobs", "expected", "cuda:0", device]
        keys = json.dumps({key: {} for key in ITEMS_OF_ORDINARY if not key.startswith("fragments")})
        with (FOLDER / "ordinary_segments.jsonl").open("w") as file:
            started = Worker(worker, {**env, "PYTORCH_CUDA_ALLOC_CONF": ORDINARY})
            error = started.run(keys, 600, lambda row: print(json.dumps(row), file=file))
    lines = (FOLDER / "card" / "measured.jsonl").read_text().splitlines()
    failed = [line[:300] for line in lines if "error" in json.loads(line)]
    print(f"{len(lines)} estimates, {len(failed)} of them failed", *failed, sep="\n")
    if error:
        sys.exit(f"error: {error}")


def environment(*folders: str) -> dict[str, str]:
    paths = [*folders, str(ROOT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
