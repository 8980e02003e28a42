# Copyright (c) the d2_memfit developers.
"""Commands with files that are damaged, or made by somebody who means harm.

Each ends soon, with one line and the right status, and nothing is written.
"""

import json
import os
import shutil
import struct
import sys
import zlib

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image
from tiny import tiny_cfg
from trained import save_trained

from d2_memfit.cli.commands import main

NO_FILE = "cannot be read (it is not a file)"
NO_CONFIG = "does not exist, as a file or as a config of the zoo"
NOT_FINITE = "has NaN or infinite values in backbone.stem.conv1.weight"
UNKNOWN_DEVICE = "MODEL.DEVICE 'tpu' is not a device of PyTorch: Expected one of cpu, cuda"
NO_SUCH_DEVICE = "PyTorch sees 0 devices of this kind"

# Options of each command, before those that are wrong.
GIVEN = {
    "estimate": "--config-file {d}/tiny.yaml --device cuda",
    "plan": "--config-file {d}/tiny.yaml --device cuda --budget 5",
    "doctor": "--config-file {d}/tiny.yaml",
    "predict": "--config-file {d}/run/config.yaml --input {d}/images/1.jpg --output {out}",
    "train": "--config-file {d}/run/config.yaml --coco h {d}/coco.json {d}",
}

# What is wrong, and what is said of it.
ROWS = {
    # What is not a file
    "estimate --config-file {d}/images": f"images' {NO_CONFIG}",
    "estimate --config-file {d}/loop.yaml": f"loop.yaml' {NO_CONFIG}",
    "estimate --config-file {d}/base_folder.yaml": "base_folder.yaml: [Errno 21] Is a directory: ",
    "estimate --config-file {d}/base_url.yaml": "<urlopen error [Errno 111] Connection refused>",
    "estimate --config-file http://127.0.0.1:9/a.yaml": "'http://127.0.0.1:9/a.yaml' does not ex",
    "estimate --config-file {d}/bases.yaml": "bases.yaml: its _BASE_ leads back to itself",
    "estimate --batch {d}/exits.py:f": "--batch must be MODULE:NAME, such as",
    "estimate --coco h {d}/images {d}/images": f"dataset h: {{d}}/images {NO_FILE}",
    "predict --input {d}/loop.yaml": "--input {d}/loop.yaml cannot be read (Too many levels of sym",
    "predict --weights {d}/images": f"the checkpoint {{d}}/images {NO_FILE}",
    # Other configs
    "estimate --config-file {d}/anchors.yaml": "found duplicate anchor; first occurrence in",
    "estimate --config-file {d}/date.yaml": "{d}/date.yaml: month must be in 1..12",
    "estimate --config-file {d}/escape.yaml": r"there is no config key \x1b[31mKEY\x1b]0;a\x07.",
    "estimate --config-file {d}/value.yaml": r"SEED must be of type int, got \x1b[2J",
    "estimate --config-file {d}/list.yaml": "SEED must be of type int, got ['a', 'a'",
    "train OUTPUT_DIR {d}/\udcff": r"'{d}/\udcff' is not UTF-8, as a config must be: use",
    "plan --coco \udcff {d}/coco.json {d}": r"--coco '\udcff' is given twice or not printable: use",
    "estimate --config-file {d}/exits.py": "exits.py cannot be loaded (SystemExit: 0)",
    # Devices
    "estimate MODEL.DEVICE tpu": UNKNOWN_DEVICE,
    "estimate --device a100 MODEL.DEVICE tpu": UNKNOWN_DEVICE,
    "estimate --device auto MODEL.DEVICE gpu": "MODEL.DEVICE 'gpu' is not a device of PyTorch",
    "predict MODEL.DEVICE tpu": UNKNOWN_DEVICE,
    "predict MODEL.DEVICE mps": f"MODEL.DEVICE mps: {NO_SUCH_DEVICE}",
    "predict MODEL.DEVICE meta": f"MODEL.DEVICE meta: {NO_SUCH_DEVICE}",
    "predict MODEL.DEVICE cuda:99": "MODEL.DEVICE cuda:99: PyTorch sees ",
    "predict MODEL.DEVICE cuda:x": "MODEL.DEVICE 'cuda:x' is not a device of PyTorch",
    "train MODEL.DEVICE mps": f"MODEL.DEVICE mps: {NO_SUCH_DEVICE}",
    # Device files
    # Weights
    "predict --weights {d}/nan.pth": NOT_FINITE,
    "predict --weights {d}/infinite.pth": NOT_FINITE,
    "predict --weights {d}/number.pth": "number.pth, it is damaged or not a checkpoint",
    "predict --weights {d}/texts.pth": "texts.pth, it is damaged or not a checkpoint",
    "predict --weights {d}/itself.pth": "itself.pth, it is damaged or not a checkpoint",
    "predict --weights {d}/sparse.pth": "sparse.pth does not fit the config: ",
    "predict --weights {d}/code.pth": "cannot read the checkpoint {d}/code.pth, it is damaged",
    # JSON
    "train --coco g {d}/deep.json {d}/images": "deep.json is not valid JSON (maximum recursion",
    "predict --coco g {d}/deep.json {d}/images": "deep.json is not valid JSON (maximum recursion",
    "doctor --coco h {d}/deep.json {d}/images": "deep.json is not valid JSON (maximum recursion",
}

# The same for one of several files, which is left out.
LEFT_OUT = {
    "predict --input {d}/large.png": ". Try --tile-size",
    "predict --input {d}/huge.png --tile-size 4000": "exceeds limit of 268435456 pixels",
}


YAML = {
    "base_folder": "_BASE_: images",
    "base_url": "_BASE_: http://127.0.0.1:9/a.yaml",
    "bases": "_BASE_: [bases.yaml, bases.yaml]",
    "anchors": "SEED: &x 1\nVERSION: &x 2",
    "date": "SEED: 2001-99-99",
    "escape": r'"\e[31mKEY\e]0;a\a": 1',
    "value": r'SEED: "\e[2J"',
    "list": f"SEED: [{'a,' * 90_000}]",
    "sequence": "- 1",
}


def make_bomb(file, side):
    """A PNG of black pixels, which is a thousand times as large in memory."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    # Pillow reads the size first, and refuses it; no pixels need to be there.
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IEND", b""))


def save_weights(folder, good):
    name = "backbone.stem.conv1.weight"
    for file, value in (("nan", float("nan")), ("infinite", float("inf"))):
        bad = {**good, name: good[name].clone()}
        bad[name].view(-1)[7] = value
        torch.save({"model": bad}, folder / f"{file}.pth")
    itself = {}
    itself["state_dict"] = itself
    others = {"number": {"model": 5}, "texts": {"model": dict.fromkeys(good, "x")}}
    others |= {"itself": itself, "sparse": {"model": {name: torch.eye(3).to_sparse()}}}
    others |= {"code": {"model": good, "x": Code(str(folder / "ran"))}}
    for file, content in others.items():
        torch.save(content, folder / f"{file}.pth")


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self._folder = folder

    def __reduce__(self):
        return os.mkdir, (self._folder,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("h")
    config = save_trained(folder / "run", "faster_rcnn", DATASETS__TRAIN="('h',)")
    (folder / "tiny.yaml").write_text(tiny_cfg("proposal_network", fpn=False).dump())
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    for name, text in YAML.items():
        (folder / f"{name}.yaml").write_text(text)
    for name, text in (
        ("texts", 'foreach: "no!"'),
        ("nan", "context_mb: .nan"),
        ("unknown", "colour: red"),
    ):
        (folder / f"{name}.yaml").write_text(text)
    image = Image.new("RGB", (24, 24))
    (folder / "images").mkdir()
    image.save(folder / "images" / "1.jpg")
    make_bomb(folder / "large.png", 14_000)
    make_bomb(folder / "huge.png", 40_000)
    coco = {
        "images": [{"id": 1, "file_name": "images/1.jpg", "height": 24, "width": 24}],
        "annotations": [
            {
                "id": 1,
                "image_id": 1,
                "category_id": 1,
                "bbox": [2, 2, 9, 9],
                "iscrowd": 0,
                "area": 81,
            }
        ],
        "categories": [{"id": 1, "name": "ring"}],
    }
    text = json.dumps(coco)
    (folder / "coco.json").write_text(text)
    (folder / "deep.json").write_text("[" * 100_000)
    save_weights(folder, torch.load(config.parent / "model_final.pth")["model"])
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def ended(folder, tmp_path, capsys, monkeypatch, alarm):
    """Runs a command to its end, and gives its status and what it says."""

    def call(row):
        command, *words = row.split(" ")
        places = {"d": folder, "out": tmp_path / "out"}
        given = GIVEN[command].split(" ")
        if command == "train" and "--coco" in words:
            place = given.index("--coco")
            given = [*given[:place], *given[place + 4 :]]
        arguments = [word.format(**places) for word in [*given, *words]]
        if command == "train" and "OUTPUT_DIR" not in words:
            arguments += ["OUTPUT_DIR", str(tmp_path / "out")]
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2**30 // 12)  # rfdetr has a limit of its own
        try:
            with pytest.raises(SystemExit) as e:
                main([command, *arguments])
        finally:
            for name in {"g", "h"} & set(DatasetCatalog.list()):
                DatasetCatalog.remove(name)
                MetadataCatalog.remove(name)
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


@pytest.mark.parametrize("row", LEFT_OUT)
def test_one_line_and_the_others_are_done(ended, row):
    status, said, places = ended(row)
    assert status == 3
    assert "files were skipped" in said
    assert sum(LEFT_OUT[row].format(**places) in line for line in said.splitlines()) == 1
