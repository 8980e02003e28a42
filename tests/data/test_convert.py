# Copyright (c) the d2_memfit developers.
"""Folders of YOLO, Pascal VOC and Roboflow, whose COCO files have the objects that were written."""

import json
import shlex
import shutil

import cv2
import pytest

from d2_memfit.cli.commands import main
from d2_memfit.data import convert_folder
from d2_memfit.errors import ConfigError, DataError

pytest.importorskip("supervision", reason="supervision needs Python 3.10")


@pytest.fixture(scope="module")
def photographs(coins):
    """For each part, some images of Coins and their annotations; the last has none."""
    found = {}
    for part in ("train", "val"):
        data = json.loads((coins / f"{part}.json").read_text())
        found[part] = []
        for image in data["images"][:4]:
            objects = [a for a in data["annotations"] if a["image_id"] == image["id"]]
            found[part].append((coins / part / image["file_name"], objects))
        found[part][-1] = (found[part][-1][0], [])
    return found


def write_yolo(folder, photographs, layout="{part}/{kind}", masks=False, **yaml):
    for part, images in photographs.items():
        places = {
            kind: folder / layout.format(part=part, kind=kind) for kind in ("images", "labels")
        }
        for place in places.values():
            place.mkdir(parents=True)
        for file, objects in images:
            shutil.copy(file, places["images"])
            height, width = cv2.imread(str(file)).shape[:2]
            lines = []
            for a in objects:
                x, y, w, h = a["bbox"]
                numbers = (x + w / 2, y + h / 2, w, h)
                if masks:
                    numbers = a["segmentation"][0]
                scaled = (f"{n / (height if i % 2 else width):.6f}" for i, n in enumerate(numbers))
                lines.append(" ".join(["0", *scaled]))
            (places["labels"] / f"{file.stem}.txt").write_text("\n".join(lines))
    names = {part: layout.format(part=part, kind="images") for part in photographs}
    data = {**names, "nc": 1, "names": ["coin"], **yaml}
    (folder / "data.yaml").write_text(json.dumps(data))  # which is YAML too


def write_voc(folder, images):
    folder.mkdir(parents=True)
    for file, objects in images:
        shutil.copy(file, folder)
        height, width = cv2.imread(str(file)).shape[:2]
        boxes = ""
        for a in objects:
            x, y, w, h = a["bbox"]
            corners = {"xmin": x + 1, "ymin": y + 1, "xmax": x + w + 1, "ymax": y + h + 1}
            inner = "".join(f"<{name}>{value}</{name}>" for name, value in corners.items())
            boxes += f"<object><name>coin</name><bndbox>{inner}</bndbox></object>"
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        text = f"<annotation><filename>{file.name}</filename>{size}{boxes}</annotation>"
        (folder / f"{file.stem}.xml").write_text(text)


def boxes_of(json_file):
    data = json.loads(json_file.read_text())
    found = {image["file_name"]: [] for image in data["images"]}
    names = {image["id"]: image["file_name"] for image in data["images"]}
    for a in data["annotations"]:
        found[names[a["image_id"]]].append(a["bbox"])
    return found


def in_order(boxes):
    return sorted(boxes, key=lambda box: [round(number) for number in box])


def check_boxes(converted, photographs, abs=0.05):
    assert [part.name for part in converted] == list(photographs)
    for part in converted:
        found = boxes_of(part.json_file)
        assert len(found) == len(photographs[part.name])
        for file, objects in photographs[part.name]:
            assert (part.image_dir / file.name).is_file()
            assert len(found[file.name]) == len(objects)
            written = [a["bbox"] for a in objects]
            for box, one in zip(in_order(found[file.name]), in_order(written)):
                assert box == pytest.approx(one, abs=abs)


@pytest.mark.parametrize(
    ("layout", "yaml"),
    [
        ("{part}/{kind}", {}),
        ("{kind}/{part}", {}),
        ("{part}/{kind}", {"train": "../train/images", "val": "../val/images"}),
        ("data/{kind}/{part}", {"path": "data", "train": "images/train", "val": "images/val"}),
    ],
    ids=["Roboflow", "Ultralytics", "with dots", "with a path"],
)
def test_yolo(photographs, tmp_path, layout, yaml):
    write_yolo(tmp_path / "in", photographs, layout, **yaml)
    check_boxes(convert_folder(tmp_path / "in", tmp_path / "out"), photographs)


def test_polygons_of_yolo_are_masks(photographs, tmp_path, capsys):
    write_yolo(tmp_path / "in", photographs, masks=True)
    main(["convert", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x" in command
    data = json.loads((tmp_path / "out" / "train.json").read_text())
    areas = sorted(a["area"] for a in data["annotations"])
    expected = sorted(a["area"] for _, objects in photographs["train"] for a in objects)
    assert areas == pytest.approx(expected, rel=0.15)  # of pixels, and of polygons


def test_pascal_voc(photographs, tmp_path):
    for part, images in photographs.items():
        write_voc(tmp_path / "in" / {"val": "valid"}.get(part, part), images)
    check_boxes(convert_folder(tmp_path / "in", tmp_path / "out"), photographs, abs=1.01)


def test_a_folder_without_held_out_images_is_said(photographs, tmp_path, capsys):
    write_voc(tmp_path / "in", photographs["train"])
    main(["convert", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")])
    assert "\nNo images are held out for evaluation: docs/" in capsys.readouterr().out


def test_what_roboflow_writes_for_coco_is_there_already(coins, tmp_path):
    for part in ("train", "valid"):
        shutil.copytree(coins / "val", tmp_path / part)
        shutil.copy(coins / "val.json", tmp_path / part / "_annotations.coco.json")
    parts = convert_folder(tmp_path, tmp_path / "out")
    assert [(p.name, p.image_dir) for p in parts] == [
        ("train", tmp_path / "train"),
        ("val", tmp_path / "valid"),
    ]
    assert not (tmp_path / "out").exists()


def test_the_command_checks_what_it_wrote_and_names_the_next(photographs, tmp_path, capsys):
    write_yolo(tmp_path / "in", photographs)
    main(["convert", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    objects = sum(len(objects) for _, objects in photographs["train"])
    assert f"4 images in {tmp_path}/in/train/images, {objects} objects of 1 classes" in printed
    assert "held out" not in printed
    command = shlex.split(printed.splitlines()[-1])
    assert command[:5] == ["d2-memfit", "train", "--fit", "--config-file", command[4]]
    assert command[4] == "COCO-Detection/faster_rcnn_R_50_FPN_3x"
    assert command[5:8] == ["--coco", "train", str(tmp_path / "out" / "train.json")]


def test_what_cannot_be_converted_is_one_line(photographs, tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        convert_folder(tmp_path / "no", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has neither a data\.yaml"):
        convert_folder(tmp_path / "empty", tmp_path / "out")
    write_yolo(tmp_path / "in", photographs, train="no/images")
    with pytest.raises(DataError, match="train: there is no folder no/images"):
        convert_folder(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "data.yaml").write_text("[1")
    with pytest.raises(DataError, match=r"data\.yaml cannot be read"):
        convert_folder(tmp_path / "in", tmp_path / "out")


def test_labels_that_are_no_numbers_are_one_line_and_leave_no_file(photographs, tmp_path):
    write_yolo(tmp_path / "in", photographs)
    next((tmp_path / "in" / "train" / "labels").iterdir()).write_text("0 a b c d\n")
    with pytest.raises(DataError, match="train/images cannot be converted"):
        convert_folder(tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.json"))
