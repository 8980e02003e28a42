# Copyright (c) the d2_memfit developers.
"""What is put in, and the one line that comes out of each command, before anything is written.

Values, files of other programs, damaged files, and files of somebody who means harm. Dataset dicts
that a project registers, and the other faults of datasets, are in tests/data.
"""

import json
import os
import resource
import shutil
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from forks import run_forked
from PIL import Image
from tiny import ROOT, tiny_cfg
from trained import save_trained

from d2_memfit.cli import train
from d2_memfit.cli.command_line import main

TRAIN_NET = ROOT / "tools" / "train_net.py"
SIZE = 24
TRIANGLE = [2.0, 2.0, 20.0, 2.0, 20.0, 20.0]

# Options of each command; those of a row come after them.
GIVEN = {
    "estimate": "--config-file {d}/tiny.yaml --device cuda",
    "doctor": "--config-file {d}/tiny.yaml",
    "predict": "--config-file {d}/run/config.yaml --input {d}/1.jpg --output {out}",
    "train": "--config-file {d}/tiny.yaml --coco h {d}/coco.json {d}",
}

# What is wrong, and what is said of it.
ROWS = {
    # Values of keys
    "train SOLVER.MAX_ITER 99999999999": "SOLVER.MAX_ITER must be a positive integer up to",
    "train SOLVER.MAX_ITER __import__('os').getpid()": "SOLVER.MAX_ITER must be of type int",
    "train SOLVER.IMS_PER_BATCH 99999999999": "SOLVER.IMS_PER_BATCH must be a positive integer up",
    "train SOLVER.BASE_LR nan": "SOLVER.BASE_LR must be of type float",
    "train SOLVER.BASE_LR 1e999": "SOLVER.BASE_LR must be a finite number",
    "train SOLVER.ACCUMULATION_STEPS 0": "SOLVER.ACCUMULATION_STEPS must be a positive integer",
    "train SOLVER.STEPS 20": "SOLVER.STEPS must be of type tuple",
    "train SOLVER 1": "SOLVER must be of type CfgNode",
    "train SOLVER.MAX_ITR 9": "no config key SOLVER.MAX_ITR (did you mean SOLVER.MAX_ITER",
    "train SOLVER.MAX_ITER": "a value is missing after SOLVER.MAX_ITER",
    "train . 3": "there is no config key .",
    "train DATALOADER.NUM_WORKERS -1": "DATALOADER.NUM_WORKERS must be an integer of at least 0",
    "train DATASETS.TRAIN ('bda',)": "DATASETS.TRAIN names 'bda', but there is no such dataset",
    "train INPUT.MIN_SIZE_TRAIN (-8,)": "INPUT.MIN_SIZE_TRAIN must be one or more sizes in pixels",
    "train MODEL.META_ARCHITECTURE RCNN": "the model cannot be built from this config (KeyError(",
    "train MODEL.ROI_HEADS.NUM_CLASSES 80": "MODEL.ROI_HEADS.NUM_CLASSES 80 does not fit the data",
    "train MODEL.DEVICE mps": "MODEL.DEVICE mps: PyTorch sees 0 devices of this kind",
    "predict MODEL.DEVICE cuda:99": "MODEL.DEVICE cuda:99: PyTorch sees ",
    "estimate MODEL.DEVICE tpu": "MODEL.DEVICE 'tpu' is not a device of PyTorch",
    "train MODEL.WEIGHTS {d}/images": "{d}/images cannot be read (it is not a file)",
    "train OUTPUT_DIR ''": "OUTPUT_DIR is empty: name a folder",
    "train OUTPUT_DIR /dev/null/a": "/dev/null is not a folder that you may write to",
    "train OUTPUT_DIR {d}/\udcff": r"'{d}/\udcff' is not UTF-8",
    "train --num-gpus 3": "SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, 3",
    "train --hold-out 0": "--hold-out 0 ",
    "train --card 7GB": "--card: '7GB' is not known",
    "estimate --batch {d}/exits.py:f": "--batch must be MODULE:NAME",
    # Config files
    "train --config-file no/such.yaml": "--config-file 'no/such.yaml' does not exist",
    "estimate --config-file {d}/images": "--config-file '{d}/images' does not exist",
    "estimate --config-file {d}/loop.yaml": "--config-file '{d}/loop.yaml' does not exist",
    "estimate --config-file {d}/exits.py": "exits.py cannot be loaded (SystemExit: 0)",
    "train --config-file {d}/text.txt": "not a config: it must be a mapping of keys to values",
    "train --config-file {d}/empty.yaml": "not a config: it must be a mapping of keys to values",
    "train --config-file {d}/other.yaml": "other.yaml: there is no config key services.web.image",
    "train --config-file {d}/itself.yaml": "itself.yaml: its _BASE_ leads back to itself",
    "train --config-file {d}/no_base.yaml": "no_base.yaml: [Errno 2] No such file or directory",
    "estimate --config-file {d}/base_url.yaml": "Connection refused",
    "train --config-file {d}/unsafe.yaml": "unsafe.yaml: could not determine a constructor",
    "train --config-file {d}/tower.yaml": "tower.yaml: only arithmetic is computed in a config",
    "train --config-file {d}/binary.yaml": "binary.yaml: ",
    "estimate --config-file {d}/date.yaml": "{d}/date.yaml: month must be in 1..12",
    "estimate --config-file {d}/escape.yaml": r"there is no config key \x1b[31mKEY\x1b]0;a\x07.",
    "estimate --config-file {d}/long.yaml": "SEED must be of type int, got ['a', 'a'",
    # Datasets
    "train --coco h {d}/images {d}": "dataset h: {d}/images cannot be read (it is not a file)",
    "train --coco h {d}/empty.json {d}": "empty.json is not valid JSON",
    "train --coco h {d}/cut.json {d}": "cut.json is not valid JSON",
    "doctor --coco h {d}/deep.json {d}": "deep.json is not valid JSON (maximum recursion",
    "train --coco h {d}/utf16.json {d}": "utf16.json is not valid JSON",
    "train --coco h {d}/digits.json {d}": "digits.json is not valid JSON",
    "train --coco h {d}/list.json {d}": "list.json is not in COCO's format",
    "train --coco h {d}/image_text.json {d}": "has an entry without file_name, height, id, wid",
    "train --coco h {d}/line_break.json {d}": r"{d}/a\nb.jpg",
    "train --coco h {d}/zero_byte.json {d}": "1 of 2 images do not exist",
    "train --coco h {d}/passwd.json {d}": "/etc/passwd (Unid",
    "train --coco h {d}/address.json {d}": "1 of 2 images do not exist",
    "train --coco h {d}/no_category.json {d}": "has the category_id 7",
    "train --coco h {d}/no_number.json {d}": "a polygon with a corner that is NaN",
    "train --coco h {d}/area.json {d} DATASETS.TEST ('h',)": "annotations in {d}/area.json have no",
    # Weights, images
    "predict --weights {d}/nan.pth": "NaN or infinite values in backbone.stem.conv1.weight",
    "predict --weights {d}/texts.pth": "texts.pth, it is damaged or not a checkpoint",
    "predict --weights {d}/itself.pth": "itself.pth, it is damaged or not a checkpoint",
    "predict --weights {d}/code.pth": "cannot read the checkpoint {d}/code.pth, it is damaged",
    "predict --input {d}/loop.yaml": "--input {d}/loop.yaml cannot be read",
}

FILES = {
    "exits.py": "import sys\nsys.exit(0)\n",
    "text.txt": "no config, and no weights",
    "empty.yaml": "",
    "other.yaml": "services: {web: {image: nginx}}\n",
    "itself.yaml": "_BASE_: itself.yaml\n",
    "no_base.yaml": "_BASE_: no_such.yaml\n",
    "base_url.yaml": "_BASE_: http://127.0.0.1:9/a.yaml",
    "unsafe.yaml": "SEED: !!python/object/apply:os.getpid []\n",
    "tower.yaml": 'SEED: !!python/object/apply:eval ["2**2**2**2**2**2"]\n',
    "binary.yaml": "\x00\x01",
    "date.yaml": "SEED: 2001-99-99",
    "escape.yaml": r'"\e[31mKEY\e]0;a\a": 1',
    "long.yaml": f"SEED: [{'a,' * 90_000}]",
    "empty.json": "",
    "cut.json": '{"images": [',
    "deep.json": "[" * 100_000,
    "digits.json": f'{{"images": {"9" * 5000}}}',
    "list.json": "[]",
}
# Places in a COCO file, and what stands there.
ANNOTATION, IMAGE = ("annotations", 0), ("images", 0)
COCO = {
    "coco": (),
    "image_text": (*IMAGE, "a"),
    "line_break": (*IMAGE, "file_name", "a\nb.jpg"),
    "zero_byte": (*IMAGE, "file_name", "a\0b.jpg"),
    "passwd": (*IMAGE, "file_name", "/etc/passwd"),
    "address": (*IMAGE, "file_name", "http://127.0.0.1:9/a.jpg"),
    "no_category": (*ANNOTATION, "category_id", 7),
    "no_number": (*ANNOTATION, "segmentation", [[float("nan"), *TRIANGLE[1:]]]),
    "area": (*ANNOTATION, "area", [1]),
}


def coco_with(*place):
    """A COCO file of two images with another value at a place."""
    image = {"height": SIZE, "width": SIZE}
    annotation = {"bbox": [2, 2, 18, 18], "area": 162, "iscrowd": 0, "category_id": 1}
    coco = {
        "images": [{"id": i, "file_name": f"{i}.jpg", **image} for i in (1, 2)],
        "annotations": [
            {"id": i, "image_id": i, "segmentation": [list(TRIANGLE)], **annotation} for i in (1, 2)
        ],
        "categories": [{"id": 1, "name": "ring"}],
    }
    node = coco
    for key in place[:-2]:
        node = node[key]
    if place:
        node[place[-2]] = place[-1]
    return json.dumps(coco)


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self._folder = folder

    def __reduce__(self):
        return os.mkdir, (self._folder,)


def save_weights(folder, good):
    name = "backbone.stem.conv1.weight"
    bad = good[name].clone()
    bad.view(-1)[7] = float("nan")
    itself = {}
    itself["state_dict"] = itself
    files = {"nan": {"model": {**good, name: bad}}, "texts": {"model": dict.fromkeys(good, "x")}}
    files |= {"itself": itself, "code": {"model": good, "x": Code(str(folder / "ran"))}}
    for file, content in files.items():
        torch.save(content, folder / f"{file}.pth")


def make_bomb(file, side):
    """A PNG of black pixels, which is a thousand times as large in memory."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    # Pillow reads the size first, and refuses it; no pixels need to be there.
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files, which the tests leave as it is."""
    folder = tmp_path_factory.mktemp("h")
    config = save_trained(folder / "run", "faster_rcnn", DATASETS__TRAIN="('h',)")
    save_weights(folder, torch.load(config.parent / "model_final.pth")["model"])
    cfg = tiny_cfg("mask_rcnn")
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 5
    coco = {f"{name}.json": coco_with(*place) for name, place in COCO.items()}
    for name, content in {**FILES, **coco, "tiny.yaml": cfg.dump()}.items():
        (folder / name).write_text(content)
    (folder / "utf16.json").write_bytes('{"images": []}'.encode("utf-16"))
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "images").mkdir()
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))
    for i in (1, 2):
        image.save(folder / f"{i}.jpg")
    make_bomb(folder / "large.png", 14_000)
    make_bomb(folder / "huge.png", 40_000)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ended(folder, tmp_path, capsys, monkeypatch, alarm):
    """Runs a command to its end, and gives its status, what it says, and names of places."""

    def call(row):
        command, *words = row.split(" ")
        places = {"d": folder, "out": tmp_path / "out"}
        given = GIVEN[command].split(" ")
        if "--coco" in words and "--coco" in given:
            given = given[: given.index("--coco")]
        options = [word for word in words if word.startswith("--")]
        keys = words if not options else words[4:] if "--coco" in words else []
        arguments = [*given, *words[: len(words) - len(keys)]]
        if command == "train" and "OUTPUT_DIR" not in keys:
            arguments += ["OUTPUT_DIR", "{out}"]
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(train, "launch", None)  # nothing is started
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2**30 // 12)  # rfdetr has a limit of its own
        try:
            with pytest.raises(SystemExit) as e:
                main([command, *(word.format(**places) for word in [*arguments, *keys])])
        finally:
            if "h" in DatasetCatalog.list():
                DatasetCatalog.remove("h")
                MetadataCatalog.remove("h")
        return e.value.code, capsys.readouterr().err, places

    return call


@pytest.mark.parametrize("row", ROWS)
def test_one_line_and_nothing_is_written(ended, tmp_path, folder, row):
    status, said, places = ended(row)
    assert status == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said.endswith(f"{errors[0]}\n")
    assert ROWS[row].format(**places) in errors[0]
    assert len(errors[0]) < 2100
    assert errors[0].isprintable()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("predict --input {d}/large.png", ". Try --tile-size"),
        ("predict --input {d}/huge.png --tile-size 4000", "exceeds limit of 268435456 pixels"),
    ],
)
def test_an_image_that_is_a_bomb_is_left_out(ended, row, message):
    status, said, _ = ended(row)
    assert status == 3
    assert "files were skipped" in said
    assert sum(message in line for line in said.splitlines()) == 1


def test_the_command_as_a_process(folder, tmp_path):
    """A mistake would cost the process its life, and not the machine its RAM."""
    file = folder / "no_number.json"
    arguments = ["--config-file", folder / "tiny.yaml", "--coco", "bad", file, folder]
    arguments += ["OUTPUT_DIR", tmp_path / "output"]
    run = run_forked(TRAIN_NET, *arguments, limits=[(resource.RLIMIT_AS, 16 * 2**30)])
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: bad, {file}: 1 of 2 objects have a polygon with a corner")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--eval-only"]])
def test_a_full_disk_at_the_start_leaves_the_config_of_an_earlier_run(folder, tmp_path, options):
    output = tmp_path / "output"
    output.mkdir()
    earlier = (folder / "tiny.yaml").read_text()
    (output / "config.yaml").write_text(earlier)
    coco = ["--coco", "good", folder / "coco.json", folder]
    arguments = [*options, "--config-file", output / "config.yaml", *coco, "OUTPUT_DIR", output]
    run = run_forked(TRAIN_NET, *arguments, limits=[(resource.RLIMIT_FSIZE, 3000)])
    assert run.returncode == 2, run.stderr
    assert f"error: OUTPUT_DIR {output} cannot be written (File too large)" in run.stderr
    assert (output / "config.yaml").read_text() == earlier
    assert set(os.listdir(output)) <= {"config.yaml", "log.txt"}
