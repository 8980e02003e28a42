# Copyright (c) the d2_memfit developers.
"""What is put in, and the one line that comes out: of the command, before anything is started.

Dataset dicts that a project registers are in tests/data/test_faults.py.
"""

import json
import os
import resource
import sys

import numpy as np
import pytest
import torch
import train_net
from detectron2.data import DatasetCatalog, MetadataCatalog
from forks import run_forked
from PIL import Image
from tiny import ROOT, run_process, tiny_cfg

from d2_memfit.cli import train

TRAIN_NET = ROOT / "tools" / "train_net.py"
NAN = float("nan")
SIZE = 24
TRIANGLE = [2.0, 2.0, 20.0, 2.0, 20.0, 20.0]


def good_coco():
    image = {"height": SIZE, "width": SIZE}
    annotation = {"bbox": [2, 2, 18, 18], "area": 162, "iscrowd": 0, "category_id": 1}
    return {
        "images": [{"id": i, "file_name": f"{i}.jpg", **image} for i in (1, 2)],
        "annotations": [
            {"id": i, "image_id": i, "segmentation": [list(TRIANGLE)], **annotation} for i in (1, 2)
        ],
        "categories": [{"id": 1, "name": "ring"}],
    }


def put(place, *path, value=None):
    """What changes one place of a COCO file."""

    def change(coco):
        *parents, last = path
        node = coco[place]
        for key in parents:
            node = node[key]
        node[last] = value

    return change


def whole(place, value):
    return lambda coco: coco.update({place: value})


def polygon(*corners):
    return put("annotations", 0, "segmentation", value=[list(corners)])


ANNOTATION, IMAGE = ("annotations", 0), ("images", 0)

# What is wrong with the COCO file that is trained on. tests/data has the other faults.
COCO = {
    "no images": (whole("images", []), "the list 'images' of {file} has no entries"),
    "an image is text": (whole("images", ["a"]), "has an entry without file_name, height, id, wid"),
    "height of text": (put(*IMAGE, "height", value="24"), "has the height '24' with the id 1"),
    "image is not there": (put(*IMAGE, "file_name", value="x.jpg"), "1 of 2 images do not exist"),
    "line break in a name": (put(*IMAGE, "file_name", value="a\nb.jpg"), "{folder}/a\\nb.jpg"),
    "zero byte in a name": (put(*IMAGE, "file_name", value="a\0b.jpg"), "1 of 2 images do not ex"),
    "half a character": (put(*IMAGE, "file_name", value="a\udc80.jpg"), "{folder}/a\\udc80.jpg"),
    "file_name of another folder": (
        put(*IMAGE, "file_name", value="/etc/passwd"),
        "opened images cannot be decoded. Training stops when one is loaded: /etc/passwd (Unid",
    ),
    "file_name is an address": (
        put(*IMAGE, "file_name", value="http://127.0.0.1:9/a.jpg"),
        "1 of 2 images do not exist. Correct their names or folder: {folder}/http://127.0.0.1:9/",
    ),
    "category_id of none": (
        put(*ANNOTATION, "category_id", value=7),
        "has the category_id 7, but nothing has",
    ),
    "all boxes are corners": (
        lambda coco: [a.update(bbox=[10, 9, 20, 21]) for a in coco["annotations"]],
        "bad, {file}: 2 of 2 boxes exceed their image, but would fit",
    ),
    "mask null": (
        put(*ANNOTATION, "segmentation", value=None),
        "bad, {file}: MODEL.MASK_ON is True, but 1 of 2 objects have no mask",
    ),
    "polygon with NaN": (
        polygon(NAN, *TRIANGLE[1:]),
        "bad, {file}: 1 of 2 objects have a polygon with a corner that is NaN, inf",
    ),
}

# What the file is, in place of one in COCO's format.
CONTENTS = {
    "empty": (b"", "is not valid JSON"),
    "cut off": (b'{"images": [', "is not valid JSON"),
    "binary": (bytes(range(128, 256)), "is not valid JSON"),
    "of UTF-16": ('{"images": []}'.encode("utf-16"), "is not valid JSON"),
    "with a BOM": (b"\xef\xbb\xbf{}", "is not valid JSON"),
    "nested without end": (b"[" * 200_000, "is not valid JSON"),
    "a list": (b"[]", "is not in COCO's format: it has no 'images'"),
    "a number": (b"7", "is not in COCO's format: it has no 'images'"),
    "null": (b"null", "is not in COCO's format: it has no 'images'"),
    "a mapping of nothing": (b"{}", "the list 'images' of {file} is missing"),
    "a number too long": (b'{"images": ' + b"9" * 5000 + b"}", "is not valid JSON"),
}


IMAGES = {
    "text": (lambda file: file.write_text("no image"), "1.jpg (UnidentifiedImageError: "),
    "a pipe": (os.mkfifo, "1 of 2 images do not exist"),
    "a link to itself": (
        lambda file: file.symlink_to(file),
        "1 of 2 images do not exist",
    ),
}

# Keys and options, and what is said of them.
OPTIONS = {
    "--hold-out 0": "--hold-out 0 of 2 images leaves a part without images: name a share between",
    "--hold-out 0.5 --coco other {file} {folder}": "divides one dataset, but there are 2 --coco",
    "SOLVER.MAX_ITER 0": "SOLVER.MAX_ITER must be a positive integer up to 1000000000, got 0",
    "SOLVER.MAX_ITER many": "SOLVER.MAX_ITER must be of type int, got many",
    "SOLVER.ACCUMULATION_STEPS 0": "must be a positive integer up to 1000000, got 0",
    "SOLVER.STEPS 20": "SOLVER.STEPS must be of type tuple, got 20",
    "SOLVER.MAX_ITER 99999999999": "integer up to 1000000000, got 99999999999",
    "SOLVER.IMS_PER_BATCH 99999999999": "integer up to 1000000, got 99999999999",
    "SOLVER.BASE_LR high": "SOLVER.BASE_LR must be of type float, got high",
    "SOLVER.REFERENCE_WORLD_SIZE 3": "must be divisible by SOLVER.REFERENCE_WORLD_SIZE, 3, got 2",
    "SOLVER.MAX_ITR 9": "there is no config key SOLVER.MAX_ITR (did you mean SOLVER.MAX_ITER",
    "SOLVER.MAX_ITER=5": "a value is missing after SOLVER.MAX_ITER=5",
    "SOLVER.MAX_ITER.X 3": "no config key SOLVER.MAX_ITER.X (did you mean SOLVER.MAX_ITER",
    "solver.max_iter 3": "there is no config key solver.max_iter",
    ". 3": "there is no config key .",
    "SOLVER.MAX_ITER __import__('os').getpid()": "SOLVER.MAX_ITER must be of type int, got __impor",
    "SOLVER.BASE_LR nan": "SOLVER.BASE_LR must be of type float, got nan",
    "SOLVER.BASE_LR 1e999": "SOLVER.BASE_LR must be a finite number, got inf",
    "SOLVER 1": "SOLVER must be of type CfgNode",
    "SOLVER.MAX_ITER": "a value is missing after SOLVER.MAX_ITER",
    "DATALOADER.NUM_WORKERS -1": "DATALOADER.NUM_WORKERS must be an integer of at least 0, got -1",
    "DATASETS.TRAIN ()": "DATASETS.TRAIN is empty: name a dataset to train on",
    "DATASETS.TRAIN ('bda',)": "DATASETS.TRAIN names 'bda', but there is no such dataset",
    "DATASETS.TRAIN bad": "DATASETS.TRAIN must be of type tuple, got bad",
    "INPUT.MIN_SIZE_TRAIN ()": "INPUT.MIN_SIZE_TRAIN must be one or more sizes in pixels",
    "INPUT.MIN_SIZE_TRAIN (-8,)": "sizes in pixels, each an integer of at least 0, got (-8,)",
    "MODEL.META_ARCHITECTURE RCNN": "(KeyError(\"No object named 'RCNN' found in 'META_ARCH'",
    "MODEL.RESNETS.DEPTH 51": "the model cannot be built from this config (KeyError(51)",
    "MODEL.ROI_HEADS.NUM_CLASSES 80": "MODEL.ROI_HEADS.NUM_CLASSES 80 does not fit the data: ",
    "MODEL.KEYPOINT_ON True": "{file}: MODEL.KEYPOINT_ON is True, but 2 of 2 objects have no keyp",
    "MODEL.META_ARCHITECTURE RetinaNet": "cannot be built from this config (KeyError('p7')",
    "MODEL.FPN.IN_FEATURES ['res9']": "cannot be built from this config (KeyError('res9')",
    "MODEL.FPN.NORM XX": "cannot be built from this config (KeyError('XX')",
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS [[0.0]]": "(ZeroDivisionError('float division by zero')",
    "MODEL.RPN.IOU_THRESHOLDS [0.7,0.3]": "cannot be built from this config (AssertionError()",
    "MODEL.DEVICE tpu9": "MODEL.DEVICE 'tpu9' is not a device of PyTorch",
    "MODEL.WEIGHTS no/such.pth": "the checkpoint no/such.pth cannot be read (No such ",
    "MODEL.WEIGHTS http://127.0.0.1:9/w.pkl": "the weights http://127.0.0.1:9/w.pkl cannot be down",
    "OUTPUT_DIR {folder}/text.txt": "{folder}/text.txt is not a folder that you may write to",
    "MODEL.WEIGHTS {folder}": "the checkpoint {folder} cannot be read (it is not a file)",
    "OUTPUT_DIR /dev/null/a": "/dev/null/a/config.yaml cannot be written: /dev/null is not",
    "OUTPUT_DIR ''": "OUTPUT_DIR is empty: name a folder",
    "--num-gpus 3": "SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, 3, got 2",
    "--card 7GB": "--card: '7GB' is not known",
    "--config-file no/such.yaml": "--config-file 'no/such.yaml' does not exist",
    "--config-file {folder}/text.txt": "not a config: it must be a mapping of keys to values",
    "--config-file {folder}/itself.yaml": "itself.yaml: its _BASE_ leads back to itself",
    "--config-file {folder}/no_base.yaml": "no_base.yaml: [Errno 2] No such file or directory: '",
    "--config-file {folder}/tower.yaml": "tower.yaml: only arithmetic is computed in a config, not",
    "--config-file {folder}/zero.yaml": "(float division by zero)",
    "--config-file {folder}/half.yaml": "only arithmetic is computed in a config, not '1 if'",
    "--config-file {folder}/list.yaml": "only arithmetic is computed in a config, not '[0] * 10**9",
    "--config-file {folder}/shift.yaml": "('1 << 10 ** 10' is not arithmetic)",
    "--config-file {folder}/unsafe.yaml": "unsafe.yaml: ",
    "--config-file {folder}/binary.yaml": "binary.yaml: ",
    "--config-file {folder}/key.yaml": "key.yaml: there is no config key NO_SUCH_KEY",
    "--coco other no/such.json no": "dataset other: no/such.json cannot be read (No such",
    "--coco other {folder} no": "dataset other: {folder} cannot be read (it is not a f",
    "--coco bad {file} {folder}": "--coco 'bad' is given twice or not printable: use another",
}

FILES = {
    "text.txt": "no config, and no weights",
    "itself.yaml": "_BASE_: itself.yaml\n",
    "no_base.yaml": "_BASE_: no_such.yaml\n",
    "unsafe.yaml": "SEED: !!python/object/apply:os.getpid []\n",
    "binary.yaml": "\x00\x01",
    "key.yaml": "NO_SUCH_KEY: 1\n",
}
ARITHMETIC = {
    "tower.yaml": "2**2**2**2**2**2",
    "zero.yaml": "1/0",
    "half.yaml": "1 if",
    "list.yaml": "[0] * 10**9",
    "shift.yaml": "1 << 10**10",
}
FILES |= {
    name: f'SEED: !!python/object/apply:eval ["{text}"]\n' for name, text in ARITHMETIC.items()
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A config file, and a folder with two good images, which the tests leave as it is."""
    folder = tmp_path_factory.mktemp("bad_input")
    cfg = tiny_cfg("mask_rcnn")
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 5
    (folder / "tiny.yaml").write_text(cfg.dump())
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "folder").mkdir()
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8))
    for i in (1, 2):
        image.save(folder / f"{i}.jpg")
    return folder


@pytest.fixture
def said(config, tmp_path, capsys, monkeypatch):
    """Calls the command with changed files, and gives the one line that it says."""

    def call(change=lambda coco: None, content=None, folder=config, options="", starts=False):
        if not starts:
            monkeypatch.setattr(train, "launch", None)
        coco = good_coco()
        change(coco)
        file = tmp_path / "bad.json"
        file.write_bytes(json.dumps(coco).encode() if content is None else content)
        names = {"file": str(file), "folder": str(folder)}
        options = [o.format(**names) for o in options.split(" ") if o]
        keys = [] if options[:1] and options[0].startswith("--") else options
        flags = [] if keys else options
        flags = (
            flags if "--config-file" in flags else ["--config-file", f"{config}/tiny.yaml", *flags]
        )
        output = [] if "OUTPUT_DIR" in keys else ["OUTPUT_DIR", str(tmp_path / "output")]
        coco_option = ["--coco", "bad", str(file), str(folder)]
        if "other" in flags:
            output += ["DATASETS.TRAIN", "('other',)"]
        argv = ["train_net.py", *flags, *coco_option, *output, *keys]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            with pytest.raises(SystemExit) as e:
                train_net.run()
        finally:
            for name in {"bad", "other"} & set(DatasetCatalog.list()):
                DatasetCatalog.remove(name)
                MetadataCatalog.remove(name)
        assert e.value.code == 2
        assert not (tmp_path / "output").exists()
        line = capsys.readouterr().err
        if "://" in " ".join(options):  # a download shows its progress first
            line = line[line.index("error: ") :]
        assert line.startswith("error: ")
        assert line.count("\n") == 1
        assert len(line) < 1000
        return line, names

    return call


@pytest.mark.parametrize("area", ["162", None, NAN, [1]])
def test_an_area_that_pycocotools_cannot_compare(said, area):
    line, names = said(put(*ANNOTATION, "area", value=area), options="DATASETS.TEST ('bad',)")
    assert f"bad cannot be evaluated: 1 annotations in {names['file']} have no area" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_asked_for_and_not_there(said, device):
    line, _ = said(options=f"MODEL.DEVICE {device}")
    assert f"MODEL.DEVICE {device}: PyTorch sees 0 devices of this kind" in line


@pytest.mark.parametrize("name", COCO)
def test_a_coco_file(said, name):
    change, message = COCO[name]
    line, names = said(change)
    assert message.format(**names) in line


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_another(said, name):
    content, message = CONTENTS[name]
    line, names = said(content=content)
    assert message.format(**names) in line
    assert names["file"] in line


@pytest.mark.parametrize("name", IMAGES)
def test_an_image(said, tmp_path, config, name):
    save, message = IMAGES[name]
    folder = tmp_path / "images"
    folder.mkdir()
    Image.open(config / "1.jpg").save(folder / "2.jpg")
    save(folder / "1.jpg")
    line, names = said(folder=folder)
    assert message.format(**names) in line


@pytest.mark.parametrize("options", OPTIONS)
def test_an_option(said, options):
    line, names = said(options=options)
    assert OPTIONS[options].format(**names) in line


# A trainer of a project, with a dataset that it registers; what is wrong comes first.
SCRIPT = """
import sys
from detectron2.data import DatasetCatalog
from d2_memfit import MemfitTrainer
from d2_memfit.config.load import load_cfg
from d2_memfit.errors import exit_on_error

image = {{"file_name": "{folder}/1.jpg", "image_id": 1, "height": 24, "width": 24}}
polygon = [2.0, 2.0, 20.0, 2.0, 20.0, 20.0]
annotation = {{"bbox": [2, 2, 18, 18], "bbox_mode": 1, "category_id": 0, "segmentation": [polygon]}}
{change}
dicts = [{{**image, "annotations": [annotation]}}]
DatasetCatalog.register("mine", lambda: dicts)
opts = ["DATASETS.TRAIN", ("mine",), "OUTPUT_DIR", "{output}", "SOLVER.MAX_ITER", 3]
opts += ["DATASETS.TEST", ()]

@exit_on_error
def main():
    MemfitTrainer(load_cfg("{folder}/tiny.yaml", opts)).train()

main()
"""


# A mistake costs the process its life, and not the machine its RAM.
ADDRESS_SPACE = (resource.RLIMIT_AS, 16 * 2**30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "polygon[0] = float('nan')",
            "error: 1 of 1 objects have a polygon with a corner that is N",
        ),
        (
            "image['file_name'] = '{folder}/text.txt'",
            "error: the image {folder}/text.txt cannot be",
        ),
    ],
)
def test_a_project_with_a_registered_dataset(config, tmp_path, change, message):
    places = {"folder": config, "output": tmp_path / "output"}
    script = SCRIPT.format(change=change.format(**places), **places)
    run = run_forked("-c", script, limits=[ADDRESS_SPACE])
    assert run.returncode == 2, run.stdout[-2000:] + run.stderr[-2000:]
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(message.format(**places))
    assert "Traceback" not in run.stderr


def test_the_command_as_a_process(config, tmp_path):
    coco = good_coco()
    polygon(NAN, *TRIANGLE[1:])(coco)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(coco))
    arguments = ["--config-file", config / "tiny.yaml", "--coco", "bad", file, config]
    arguments += ["OUTPUT_DIR", tmp_path / "output"]
    run = run_forked(TRAIN_NET, *arguments, limits=[ADDRESS_SPACE])
    assert run.returncode == 2
    assert run.stderr.startswith(f"error: bad, {file}: 1 of 2 objects have a polygon with a corner")
    assert run.stderr.count("\n") == 1


def fill_the_disk():
    """Each file can have 100 bytes: Python gets an error in writing as from a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def test_a_disk_that_is_full_at_the_start(config, tmp_path):
    file = tmp_path / "good.json"
    file.write_text(json.dumps(good_coco()))
    command = [sys.executable, "-W", "ignore", TRAIN_NET]
    command += ["--config-file", config / "tiny.yaml", "--coco", "good", file, config]
    run = run_process([*command, "OUTPUT_DIR", tmp_path / "output"], preexec_fn=fill_the_disk)
    assert run.returncode == 2
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert line == f"error: OUTPUT_DIR {tmp_path}/output cannot be written (File too large)"
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("options", [[], ["--eval-only"]])
def test_a_full_disk_at_the_start_leaves_the_config_of_an_earlier_run(config, tmp_path, options):
    file = tmp_path / "good.json"
    file.write_text(json.dumps(good_coco()))
    output = tmp_path / "output"
    output.mkdir()
    earlier = (config / "tiny.yaml").read_text()
    (output / "config.yaml").write_text(earlier)
    arguments = [*options, "--config-file", output / "config.yaml", "--coco", "good", file, config]
    limits = [(resource.RLIMIT_FSIZE, 3000)]
    run = run_forked(TRAIN_NET, *arguments, "OUTPUT_DIR", output, limits=limits)
    assert run.returncode == 2, run.stderr
    assert f"error: OUTPUT_DIR {output} cannot be written (File too large)" in run.stderr
    assert (output / "config.yaml").read_text() == earlier
    assert set(os.listdir(output)) <= {"config.yaml", "log.txt"}


def test_a_name_that_is_not_of_utf_8(config, tmp_path):
    file = os.fsencode(tmp_path / "bad") + b"\xff.json"
    arguments = ["--config-file", config / "tiny.yaml", "--coco", "bad", file, config]
    run = run_forked(TRAIN_NET, *arguments)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert r"bad\udcff.json cannot be read (No such file or directory)" in run.stderr
