# Copyright (c) the d2_memfit developers.
"""Outputs of all commands and scripts: what is the user's stays, what an earlier command made goes.

The places themselves are tested in tests/common/test_files.py.
"""

import json
import os
import resource
import shutil

import cv2
import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from forks import run_forked
from PIL import Image
from tiny import tiny_cfg
from trained import save_trained

from d2_memfit.cli import train
from d2_memfit.cli.command_line import main
from d2_memfit.predict.images import picture_name

MINE = "written by a person\n"
EXISTS = "the output {} exists: "
USED = "the output {0} is the file {0}, which this command reads or writes too"
SPECIAL = "the output {} is a folder, link, pipe or device"

PLAN = "plan --config-file tiny.yaml --budget 6 --device cuda"
ESTIMATE = "estimate --config-file tiny.yaml --device cuda"
PREDICT = "predict --config-file run/config.yaml"
FINDS_NOTHING = "MODEL.ROI_HEADS.SCORE_THRESH_TEST 1.0 INPUT.MIN_SIZE_TEST 32"
TRAIN = "train --config-file tiny.yaml --coco mine val.json val"

# A command, what is there in addition, and the message. "-> FILE" is a symbolic link, "= FILE" a
# hard one, "|" a pipe, "/" a folder; other texts are those of files.
ROWS = {
    f"{PLAN} --output p.yaml": ({"p.yaml": MINE}, EXISTS.format("p.yaml")),
    f"{PLAN} --output tiny.yaml --overwrite": ({}, USED.format("tiny.yaml")),
    f"{PLAN} --output val/../tiny.yaml": ({}, "is the file tiny.yaml, which this command"),
    f"{PLAN} --output to.yaml": ({"to.yaml": "-> p", "p": MINE}, SPECIAL.format("to.yaml")),
    f"{PLAN} --output pipe --overwrite": ({"pipe": "|"}, SPECIAL.format("pipe")),
    f"{PLAN} --output a/p.yaml": ({"a": MINE}, "/a is not a folder that you may write to"),
    f"{PLAN} --coco mine val.json val --output val.json": ({}, USED.format("val.json")),
    f"{ESTIMATE} --html page.html": ({"page.html": MINE}, EXISTS.format("page.html")),
    f"{PREDICT} --input pictures --output . --overwrite": (
        {"pictures": "/", "pictures/a.png": "= val/000.png"},
        USED.format("pictures/a.png"),
    ),
    f"{PREDICT} --input val --output mine": (
        {"mine": "/", "mine/pictures": "/", "mine/pictures/001.png": MINE},
        EXISTS.format("mine/pictures/001.png"),
    ),
    f"{PREDICT} --input val --output val": (
        {"val/images.json": MINE},
        EXISTS.format("val/images.json"),
    ),
    f"{PREDICT} --input val --output file": ({"file": MINE}, "/file is not a folder that you may"),
    "measure-gpu": ({"measured.jsonl": MINE}, EXISTS.format("measured.jsonl")),
    f"{TRAIN} OUTPUT_DIR out": (
        {"out": "/", "out/config.yaml": MINE},
        EXISTS.format("out/config.yaml"),
    ),
    f"{TRAIN} --eval-only OUTPUT_DIR eval": (
        {"eval": "/", "eval/config.yaml": "SOLVER: {MAX_ITER: 5}\n"},
        EXISTS.format("eval/config.yaml"),
    ),
    f"{TRAIN} OUTPUT_DIR links": (
        {"links": "/", "links/config.yaml": "-> ../tiny.yaml"},
        SPECIAL.format("links/config.yaml"),
    ),
    "train --config-file tiny.yaml --coco mine o/metrics.json val OUTPUT_DIR o": (
        {"o": "/", "o/metrics.json": "= val.json"},
        USED.format("o/metrics.json"),
    ),
    "train --config-file lazy.py train.output_dir=lazy": (
        {"lazy": "/", "lazy/config.yaml": "train: {max_iter: 3}  # a short one\n"},
        EXISTS.format("lazy/config.yaml"),
    ),
}


@pytest.fixture(scope="module")
def users_files(coins, tmp_path_factory):
    """Configs, a dataset, and the folder of a run with its weights."""
    folder = tmp_path_factory.mktemp("outputs") / "files"
    (folder / "val").mkdir(parents=True)
    data = json.loads((coins / "val.json").read_text())
    data["images"] = data["images"][:2]
    ids = [image["id"] for image in data["images"]]
    data["annotations"] = [a for a in data["annotations"] if a["image_id"] in ids]
    (folder / "val.json").write_text(json.dumps(data))
    for image in data["images"]:
        shutil.copy(coins / "val" / image["file_name"], folder / "val")
    save_trained(folder / "run")
    cfg = tiny_cfg("mask_rcnn")
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 2
    (folder / "tiny.yaml").write_text(cfg.dump())
    (folder / "lazy.py").write_text(
        "from lazy_configs import lazy_config\n"
        "cfg = lazy_config()\n"
        "model, optimizer, train = cfg.model, cfg.optimizer, cfg.train\n"
        "dataloader = {'train': cfg.dataloader.train}\n"
    )
    return folder


@pytest.fixture
def here(users_files, tmp_path, monkeypatch):
    """A copy of these files, as the current folder."""
    folder = tmp_path / "here"
    shutil.copytree(users_files, folder)
    monkeypatch.chdir(folder)
    yield folder
    forget_dataset()


def forget_dataset():
    if "mine" in DatasetCatalog.list():
        DatasetCatalog.remove("mine")
        MetadataCatalog.remove("mine")


def put(name, content):
    if content == "/":
        os.mkdir(name)
    elif content == "|":
        os.mkfifo(name)
    elif content.startswith("-> "):
        os.symlink(content[3:], name)
    elif content.startswith("= "):
        os.link(content[2:], name)
    else:
        with open(name, "w") as file:
            file.write(content)


def all_files(folder):
    """Each name with its kind and its content, and the time of its last change."""
    found = {}
    for name in sorted(folder.rglob("*")):
        content = name.read_bytes() if name.is_file() else ""
        found[str(name)] = os.lstat(name).st_mode, os.lstat(name).st_mtime_ns, content
    return found


def run(words):
    main(words.split())


@pytest.mark.parametrize("command", ROWS)
def test_a_file_of_the_user_stays_as_it_is(command, here, monkeypatch, capsys):
    files, message = ROWS[command]
    for name, content in files.items():
        put(name, content)
    monkeypatch.setattr(train, "launch", None)
    before = all_files(here)
    with pytest.raises(SystemExit) as e:
        run(command)
    assert e.value.code == 2
    assert all_files(here) == before
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("error: ")]
    assert line == lines[-1]
    assert message in line
    assert ": move it, or name another" in line


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (f"{PLAN} --training-only --allow exact --output p.yaml", "p.yaml"),
        (f"{PREDICT} --input val {FINDS_NOTHING}", "predictions/pictures/001.png"),
    ],
)
def test_a_second_run_needs_the_option(command, name, here, capsys):
    run(command)
    before = all_files(here)
    with pytest.raises(SystemExit):
        run(command)
    assert all_files(here) == before
    assert "move it, or name another, or --overwrite" in capsys.readouterr().err
    (here / name).write_bytes(b"")
    run(f"{command.partition(' ')[0]} --overwrite {command.partition(' ')[2]}")
    assert (here / name).stat().st_size


def test_pictures_are_not_drawn_into_again(here, capsys):
    """The first run's pictures are the second one's images, and would be its outputs."""
    run(f"{PREDICT} --input val --output found")
    before = all_files(here)
    with pytest.raises(SystemExit):
        run(f"{PREDICT} --input found/pictures --output found --overwrite")
    assert all_files(here) == before
    assert USED.format("found/pictures/000.png") in capsys.readouterr().err
    run(f"{PREDICT} --input found/pictures --output found/again")
    assert sorted(os.listdir("found/again/pictures")) == ["000.png", "001.png"]


def test_images_that_differ_in_their_ending_have_different_pictures(here):
    names = ["a.bmp", "a.bmp.jpg", "a.bmp.jpg.jpg", "a.bmp.png", "a.jpg", "a.jpg.jpg", "A.JPG"]
    names += ["a.jpeg", "a.png", "a.tif", "a.tif.bmp", "a.tif.jpg", "a.tiff", "a.v2.jpg", "a.webp"]
    os.mkdir("all")
    for number, name in enumerate(names):
        Image.new("L", (64, 64), 16 * number).convert("RGB").save(f"all/{name}")
    run(f"{PREDICT} --input all --output found {FINDS_NOTHING}")
    images = json.loads((here / "found" / "images.json").read_text())["images"]
    assert sorted(image["file_name"] for image in images) == sorted(names)
    pictures = {name: picture_name(here / "all" / name) for name in names}
    assert len({picture.lower() for picture in pictures.values()}) >= len(names) - 1  # A.JPG
    assert (pictures["a.jpg"], pictures["a.v2.jpg"]) == ("a.jpg", "a.v2.jpg")
    for number, name in enumerate(names):
        picture = np.asarray(Image.open(here / "found" / "pictures" / pictures[name]).convert("L"))
        assert abs(picture.mean() - 16 * number) < 3, name


def make_video(path, frames, code="mp4v", width=160):
    video = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*code), 5.0, (width, 120))
    rng = np.random.default_rng(0)
    for _ in range(frames):
        video.write(rng.integers(0, 255, (120, width, 3), dtype=np.uint8))
    video.release()


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (f"{PREDICT} --input clip.mp4 --output found {FINDS_NOTHING}", "found/pictures/clip.mp4"),
        (f"{PREDICT} --input val --output found", "found/pictures/000.png"),
        (f"{PREDICT} --input small --output found", "found/coco_instances_results.json"),
    ],
)
def test_a_full_disk_is_an_error_and_leaves_no_part_of_a_file(command, file, here):
    """No file can have more than 8 kB."""
    make_video("clip.mp4", 3)
    os.mkdir("small")
    for number in range(6):
        Image.new("L", (16, 16), 40 * number).convert("RGB").save(f"small/{number}.jpg")
    limit = [(resource.RLIMIT_FSIZE, 8000)]
    result = run_forked("-m", "d2_memfit", *command.split(), cwd=here, limits=limit)
    assert result.returncode == 2, result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: {file} cannot be written (")
    assert "Traceback" not in result.stderr
    left = {file.name for file in (here / "found").rglob("*") if file.is_file()}
    assert left <= {*os.listdir("small")}  # made before the results were too large


def test_a_whole_video_has_all_images_and_no_other_files(here):
    make_video("clip.avi", 4, "MJPG")
    run(f"{PREDICT} --input clip.avi --output found {FINDS_NOTHING}")
    made = cv2.VideoCapture("found/pictures/clip.avi.mp4")
    assert sum(1 for _ in iter(made.grab, False)) == 4
    assert sorted(os.listdir("found/pictures")) == ["clip.avi.mp4"]
