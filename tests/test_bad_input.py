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

# What is wrong, of which a word is in the error, or what NAMED says. prose.txt has the errors.
NAMED = {
    "train OUTPUT_DIR {d}/\udcff": r"\udcff",
    "train --num-gpus 3": "SOLVER.IMS_PER_BATCH",
    "train --coco h {d}/passwd.json {d}": "/etc/passwd",
}
ROWS = (
    # Values of keys
    "train SOLVER.MAX_ITER 99999999999",
    "train SOLVER.MAX_ITER __import__('os').getpid()",
    "train SOLVER.IMS_PER_BATCH 99999999999",
    "train DATASETS.TRAIN None",
    "train SOLVER.MAX_ITER 1\n2",
    "train SOLVER.BASE_LR nan",
    "train SOLVER.BASE_LR 1e999",
    "train SOLVER.BASE_LR -1.0",
    "train SOLVER.CHECKPOINT_PERIOD 0",
    "train SEED 4294967296",
    "train SOLVER.ACCUMULATION_STEPS 0",
    "train SOLVER.STEPS 20",
    "train SOLVER 1",
    "train SOLVER.MAX_ITR 9",
    "train SOLVER.MAX_ITER",
    "train SEED 1 --resume",
    "train SEED 1 --num-gpus 2",
    "train . 3",
    "train DATALOADER.NUM_WORKERS -1",
    "train DATASETS.TRAIN ('bda',)",
    "train INPUT.MIN_SIZE_TRAIN (-8,)",
    "train MODEL.META_ARCHITECTURE RCNN",
    "train MODEL.ROI_HEADS.NUM_CLASSES 80",
    "train MODEL.DEVICE mps",
    "predict MODEL.DEVICE cuda:99",
    "estimate MODEL.DEVICE tpu",
    "train MODEL.WEIGHTS {d}/images",
    "train OUTPUT_DIR ''",
    "train OUTPUT_DIR /dev/null/a",
    "train OUTPUT_DIR {d}/\udcff",
    "train --num-gpus 3",
    "train --hold-out 0",
    "train --card 7GB",
    "estimate --batch {d}/exits.py:f",
    # Config files
    "train --config-file no/such.yaml",
    "estimate --config-file {d}/images",
    "estimate --config-file {d}/loop.yaml",
    "estimate --config-file {d}/exits.py",
    "train --config-file {d}/text.txt",
    "train --config-file {d}/empty.yaml",
    "train --config-file {d}/other.yaml",
    "train --config-file {d}/itself.yaml",
    "train --config-file {d}/no_base.yaml",
    "estimate --config-file {d}/base_url.yaml",
    "train --config-file {d}/unsafe.yaml",
    "train --config-file {d}/tower.yaml",
    "train --config-file {d}/binary.yaml",
    "estimate --config-file {d}/date.yaml",
    "estimate --config-file {d}/escape.yaml",
    "estimate --config-file {d}/long.yaml",
    # Datasets
    "train --coco h {d}/images {d}",
    "train --coco h {d}/empty.json {d}",
    "train --coco h {d}/cut.json {d}",
    "doctor --coco h {d}/deep.json {d}",
    "train --coco h {d}/utf16.json {d}",
    "train --coco h {d}/digits.json {d}",
    "train --coco h {d}/list.json {d}",
    "train --coco h {d}/image_text.json {d}",
    "train --coco h {d}/line_break.json {d}",
    "train --coco h {d}/zero_byte.json {d}",
    "train --coco h {d}/passwd.json {d}",
    "train --coco h {d}/address.json {d}",
    "train --coco h {d}/no_category.json {d}",
    "train --coco h {d}/no_number.json {d}",
    "train --coco h {d}/area.json {d} DATASETS.TEST ('h',)",
    # Weights, images
    "predict --weights {d}/nan.pth",
    "predict --weights {d}/texts.pth",
    "predict --weights {d}/itself.pth",
    "predict --weights {d}/code.pth",
    "predict --input {d}/loop.yaml",
)

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
def ended(folder, tmp_path, capsys, monkeypatch, alarm, catalogs):
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
        with pytest.raises(SystemExit) as e:
            main([command, *(word.format(**places) for word in [*arguments, *keys])])
        return e.value.code, capsys.readouterr().err, places

    return call


@pytest.mark.parametrize("row", ROWS)
def test_one_line_and_nothing_is_written(ended, prose, tmp_path, folder, row):
    status, said, places = ended(row)
    assert status == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said.endswith(f"{errors[0]}\n")
    names = [NAMED[row]] if row in NAMED else row.format(**places).split(" ")[1:]
    assert names[0] in errors[0] or any(n in errors[0] for n in names[1:] if len(n) > 3)
    assert len(errors[0]) < 2100
    prose(errors[0], **places)
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
