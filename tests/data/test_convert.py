# Copyright (c) the d2_memfit developers.
"""Datasets of YOLO, Pascal VOC, Roboflow and COCO, whose COCO files are those that train takes."""

import json
import shlex

import pytest
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from small_datasets import (
    SQUARE,
    box_row,
    coco_of,
    polygon_xml,
    row_of,
    write_voc,
    write_yolo,
)

from d2_memfit.cli import train
from d2_memfit.cli.commands import main
from d2_memfit.data import convert_dataset
from d2_memfit.errors import DataError

MASKS, BOXES = (
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",
    "COCO-Detection/faster_rcnn_R_50_FPN_3x",
)


def write_coco(folder, number=10, images="images", **changes):
    file = folder / "annotations.json"
    coco = coco_of(number, lambda i: [1, 2] if i % 2 else [1], folder / images, **changes)
    file.write_text(json.dumps(coco))
    return file


def write_roboflow(folder, splits=("train", "valid", "test")):
    for split in splits:
        coco = coco_of(2, folder=folder / split)
        (folder / split / "_annotations.coco.json").write_text(json.dumps(coco))
    return folder


def with_masks(coco):
    for annotation in coco["annotations"]:
        annotation["segmentation"] = [[n for x_y in SQUARE for n in x_y]]
    return coco


DIAGONAL = [[2, 2], [60, 44], [60.4, 43.6], [2.4, 1.6]]
LISTS = {"train": [0, 1], "val": [2], "test": [3]}
# Makes a dataset in a folder and returns the input; options, parts, and the recipe.
DATASETS = {
    "boxes of YOLO": (write_yolo, "", "train val", BOXES),
    "polygons of YOLO": (
        lambda folder: write_yolo(
            folder, [row_of(SQUARE), row_of(DIAGONAL), row_of(SQUARE[:3], 1)]
        ),
        "",
        "train val",
        MASKS,
    ),
    "YOLO, held out": (
        lambda folder: write_yolo(folder, train=["train/images", "val/images"], val=None),
        "--hold-out 0.5",
        "train val",
        BOXES,
    ),
    "a YAML file": (
        lambda folder: (write_yolo(folder) / "data.yaml").rename(folder / "coco8.yml"),
        "",
        "train val",
        BOXES,
    ),
    "Pascal VOC": (lambda folder: write_voc(folder, LISTS), "", "train val test", BOXES),
    "polygons of VOC": (
        lambda folder: write_voc(
            folder,
            objects=[("coin", (3, 3, 61, 45), polygon_xml(*SQUARE) + polygon_xml(*DIAGONAL))],
        ),
        "--hold-out 0.25",
        "train val",
        MASKS,
    ),
    "Roboflow": (write_roboflow, "", "train test val", BOXES),
    "Roboflow's single split": (
        lambda folder: write_roboflow(folder, ["train"]),
        "--hold-out 0.5",
        "train val",
        BOXES,
    ),
    "COCO": (write_coco, "--hold-out 0.2", "train val", BOXES),
    "COCO beside its images": (lambda f: write_coco(f, images=""), "", "train", BOXES),
}


@pytest.fixture
def accepted(monkeypatch):
    """Takes the printed command as training does, before it starts; gives the datasets' dicts."""

    def call(command):
        program, name, *arguments = shlex.split(command)
        assert (program, name) == ("d2-memfit", "train")
        args = train.argument_parser().parse_args([*arguments, "MODEL.WEIGHTS", ""])
        args.fit = False  # which plans
        cfg, _ = train.prepare(args)
        mapper = DatasetMapper(cfg, is_train=True)
        found = {}
        for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
            found[name] = DatasetCatalog.get(name)
            for d in found[name]:  # as a worker of the loader does
                instances = mapper(d)["instances"]
                assert len(instances) == len(d["annotations"])
                assert instances.has("gt_masks") == cfg.MODEL.MASK_ON or not len(instances)
        return found

    yield call
    for name in {"train", "val", "test"} & set(DatasetCatalog.list()):
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


@pytest.mark.slow
@pytest.mark.parametrize("dataset", DATASETS)
def test_what_is_written_is_what_train_takes(tmp_path, capsys, accepted, dataset):
    write, options, parts, recipe = DATASETS[dataset]
    source, output = write(tmp_path / "in"), tmp_path / "out"
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "in").rglob("*")}
    main(["convert", "--input", str(source), "--output", str(output), *options.split()])
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.partition(":")[0] for line in lines[: len(parts.split())]] == parts.split()
    assert ("No images are held out" in printed) == (parts == "train")
    command = lines[-1]
    assert recipe in command
    found = accepted(command)
    assert list(found) == parts.split()
    assert sum(len(d["annotations"]) for d in found["train"])
    for name in parts.split():
        objects = sum(len(d["annotations"]) for d in found[name])
        assert f" {len(found[name])} images in " in lines[parts.split().index(name)]
        assert f", {objects} objects of " in lines[parts.split().index(name)]
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "in").rglob("*")} == before


def test_nothing_is_written_for_files_that_are_there_already(tmp_path):
    convert_dataset(write_roboflow(tmp_path / "in"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_part_to_train_on_comes_first(tmp_path):
    conversion = convert_dataset(write_roboflow(tmp_path / "in"), tmp_path / "out")
    assert [file.name for file, _ in conversion.files] == ["train", "test", "val"]


def test_how_to_hold_images_out_is_said(tmp_path, capsys):
    main(["convert", "--input", str(write_voc(tmp_path / "in")), "--output", str(tmp_path / "out")])
    line = "No images are held out for evaluation: add --hold-out 0.2 to hold out a fifth"
    assert line in capsys.readouterr().out.splitlines()


def test_images_in_two_parts_are_named(tmp_path):
    lists = {"train": [0, 1, 2], "val": [2, 3], "test": [2]}
    notes = convert_dataset(write_voc(tmp_path / "in", lists), tmp_path / "out").notes
    image = tmp_path / "in" / "JPEGImages" / "2.jpg"
    text = "so results on them mean little"
    assert notes == [
        f"val: 1 images are also in train, {text}: {image}",
        f"test: 1 images are also in train, {text}: {image}",
        f"test: 1 images are also in val, {text}: {image}",
    ]


def test_all_that_is_left_out_is_in_the_file_too(tmp_path):
    rows = [box_row(8, 8, 16, 16)] * 9 + ["0 9 9 1 1"] * 7
    conversion = convert_dataset(write_yolo(tmp_path / "in", rows), tmp_path / "out")
    (line,) = conversion.notes
    assert line.count("train.txt, line ") == 3
    info = json.loads((tmp_path / "out" / "train.json").read_text())["info"]
    ((text, places),) = info["notes"].items()
    assert f"train: 7 {text}: {places[0]}; {places[1]}; {places[2]}" == line
    assert [place.rpartition(", ")[2] for place in places] == [
        f"line {n} (it lies outside its image)" for n in range(10, 17)
    ]


def test_boxes_are_learnt_where_some_objects_have_no_mask(tmp_path):
    rows = [row_of(SQUARE), box_row(8, 8, 16, 16)]
    conversion = convert_dataset(write_yolo(tmp_path / "in", rows), tmp_path / "out")
    assert conversion.config == BOXES
    (line,) = [line for line in conversion.notes if line.startswith("Only boxes can be learnt")]
    assert "MODEL.MASK_ON is True, but 1 of 2 objects have no mask" in line


def test_masks_away_from_their_boxes_are_named(tmp_path):
    away = polygon_xml([40, 30], [60, 30], [60, 44])
    objects = [("coin", (9, 9, 24, 24), polygon_xml(*SQUARE))] * 3
    objects.append(("coin", (9, 9, 24, 24), away))
    conversion = convert_dataset(write_voc(tmp_path / "in", objects=objects), tmp_path / "out")
    assert conversion.config == MASKS
    assert any("4 of 16 masks lie mostly outside" in line for line in conversion.notes)


def test_codes_are_trained_on_as_bit_masks(tmp_path):
    coco = with_masks(coco_of(2, folder=tmp_path / "images"))
    code = {"size": [48, 64], "counts": [8 * 48 + 8, 16, 32, 16, 48 * 64 - 8 * 48 - 72]}
    coco["annotations"][0].update(segmentation=code, bbox=[8, 8, 2, 16])
    (tmp_path / "a.json").write_text(json.dumps(coco))
    conversion = convert_dataset(tmp_path / "a.json", tmp_path / "out", 0.5)
    assert (conversion.config, conversion.opts) == (MASKS, ["INPUT.MASK_FORMAT", "bitmask"])


@pytest.mark.slow
def test_a_crowd_that_training_cannot_compare_is_refused(tmp_path):
    row = box_row(8, 8, 16, 16)
    write_yolo(tmp_path / "in", [row] * 50_001)
    with pytest.raises(DataError, match=r"train\.jpg has 50,001 objects"):
        convert_dataset(tmp_path / "in", tmp_path / "out")
