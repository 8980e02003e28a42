# Copyright (c) the d2_memfit developers.
import json
import os
import shutil

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import LazyConfig
from detectron2.data.detection_utils import read_image
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.engine import DefaultPredictor
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from forks import run_forked
from PIL import Image
from pycocotools.coco import COCO
from tiny import tiny_cfg, tiny_model
from trained import save_trained

from d2_memfit.cli.command_line import main
from d2_memfit.config.load import load_cfg
from d2_memfit.predict.predictor import weights_of


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return save_trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def photographs(coins, tmp_path):
    folder = tmp_path / "photographs"
    folder.mkdir()
    for name in ("000.png", "001.png"):
        Image.open(coins / "val" / name).convert("RGB").save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def predict(config, source, output, *others):
    args = ["--config-file", config, "--input", source, "--output", output, *others]
    main(["predict", *map(str, args)])


def results_of(output):
    return json.loads((output / "coco_instances_results.json").read_text())


def pictures_in(output):
    """The names of all files but the notes of what was written."""
    return sorted(p.name for p in (output / "pictures").iterdir())


def test_results_are_those_of_the_default_predictor(
    prose, config, photographs, coins, tmp_path, capsys
):
    output = tmp_path / "found"
    coco = ["--coco", "predicted_val", coins / "val.json", coins / "val"]
    predict(config, photographs, output, "--min-score", "0", *coco)
    printed = capsys.readouterr()
    prose(printed.out)
    assert str(config.parent / "model_final.pth") in printed.err
    cfg = load_cfg(str(config))
    cfg.MODEL.WEIGHTS = str(config.parent / "model_final.pth")
    predictor = DefaultPredictor(cfg)
    expected = []
    for number, name in enumerate(("000.png", "001.png"), 1):
        instances = predictor(read_image(str(photographs / name), "BGR"))["instances"]
        expected += instances_to_coco_json(instances, number)
    results = results_of(output)
    assert len(results) == len(expected) == 20
    for ours, theirs in zip(results, expected):
        assert ours.pop("category_id") == theirs.pop("category_id") + 1  # as in val.json
        assert ours == theirs
    found = COCO(str(output / "images.json")).loadRes(str(output / "coco_instances_results.json"))
    assert [i["file_name"] for i in found.loadImgs([1, 2])] == ["000.png", "001.png"]
    assert [c["name"] for c in found.dataset["categories"]] == ["coin"]
    drawn = Image.open(output / "pictures" / "000.png")
    plain = Image.open(photographs / "000.png").resize(drawn.size)
    assert np.abs(np.asarray(drawn, float) - np.asarray(plain, float)).mean() > 5


def test_the_weights_are_the_last_ones_beside_the_config(tmp_path):
    config, last = str(tmp_path / "config.yaml"), tmp_path / "model_0000014.pth"
    assert weights_of(config, "", "given.pth") == "given.pth"
    assert weights_of(config, "configured.pth", None) == "configured.pth"
    (tmp_path / "model_final.pth").touch()
    assert weights_of(config, "configured.pth", None) == str(tmp_path / "model_final.pth")
    last.touch()  # of a run that was interrupted, or went on after its end
    (tmp_path / "last_checkpoint").write_text(last.name)
    assert weights_of(config, "configured.pth", None) == str(last)


def test_without_input_the_images_of_the_dataset_are_predicted_on(
    config, photographs, tmp_path, monkeypatch
):
    """Those of two folders have the same name."""
    monkeypatch.chdir(tmp_path)
    coco = {"images": [], "annotations": [], "categories": [{"id": 7, "name": "coin"}]}
    for number, name in enumerate(("a/000.png", "a/b/000.png")):
        source = photographs / f"00{number}.png"
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        shutil.copy(source, tmp_path / "images" / name)
        width, height = Image.open(source).size
        entry = {"id": number, "file_name": name, "height": height, "width": width}
        coco["images"].append(entry)
    coco["images"].append({**entry, "id": 2})  # a file that is listed twice
    (tmp_path / "mine.json").write_text(json.dumps(coco))
    words = ["--config-file", str(config), "--coco", "two_folders", "mine.json", "images"]
    main(["predict", *words, "--output", "found", "--min-score", "0"])
    images = json.loads((tmp_path / "found" / "images.json").read_text())["images"]
    assert [image["file_name"] for image in images] == ["000.png", "b/000.png"]
    assert {result["category_id"] for result in results_of(tmp_path / "found")} == {7}
    assert {*pictures_in(tmp_path / "found")} >= {"000.png", "b"}


def test_files_that_cannot_be_read_are_a_line_each_and_the_others_are_done(
    config, photographs, tmp_path, capsys
):
    whole = (photographs / "000.png").read_bytes()
    (photographs / "0.png").write_bytes(whole[: len(whole) // 2])
    (photographs / "text.jpg").write_text("no image")
    (photographs / "text.mp4").write_text("no video")
    Image.new("RGB", (4000, 3)).save(photographs / "thin.png")
    with pytest.raises(SystemExit) as e:
        predict(config, photographs, tmp_path / "found")
    assert e.value.code == 3
    printed = capsys.readouterr()
    for name in ("/0.png", "text.jpg", "text.mp4"):
        assert sum(f"{name} cannot be read" in line for line in printed.err.splitlines()) == 1
    assert (
        "thin.png is skipped: 4000 x 3 pixels cannot be resized (height and width must be"
        in printed.err
    )
    assert "4 of 6 files were skipped" in printed.err
    assert "2 images" in printed.out
    assert {r["image_id"] for r in results_of(tmp_path / "found")} == {1, 2}
    assert pictures_in(tmp_path / "found") == ["000.png", "001.png"]


def test_a_video_becomes_one(config, photographs, tmp_path):
    file, codec = str(photographs / "clip.mp4"), cv2.VideoWriter.fourcc(*"mp4v")
    video = cv2.VideoWriter(file, codec, 5.0, (150, 100))
    for _ in range(3):
        video.write(cv2.imread(str(photographs / "000.png"))[:100, :150])
    video.release()
    predict(config, photographs / "clip.mp4", tmp_path / "found")
    images = json.loads((tmp_path / "found" / "images.json").read_text())["images"]
    assert [i["file_name"] for i in images] == ["clip.mp4#0", "clip.mp4#1", "clip.mp4#2"]
    assert {(i["height"], i["width"]) for i in images} == {(100, 150)}
    assert {r["image_id"] for r in results_of(tmp_path / "found")} == {1, 2, 3}
    made = cv2.VideoCapture(str(tmp_path / "found" / "pictures" / "clip.mp4"))
    assert made.get(cv2.CAP_PROP_FRAME_COUNT) == 3
    assert pictures_in(tmp_path / "found") == ["clip.mp4"]


def test_one_tile_finds_what_the_whole_image_has_and_many_find_more(config, photographs, tmp_path):
    source = photographs / "000.png"
    predict(config, source, tmp_path / "whole")
    predict(config, source, tmp_path / "one", "--tile-size", "1000", "--min-score", "1")
    predict(config, source, tmp_path / "many", "--tile-size", "100", "--min-score", "1")
    whole, one, many = (results_of(tmp_path / name) for name in ("whole", "one", "many"))
    assert [r["segmentation"] for r in one] == [r["segmentation"] for r in whole]
    assert [r["score"] for r in one] == pytest.approx([r["score"] for r in whole])
    assert len(many) > len(whole)
    drawn = {(tmp_path / n / "pictures" / "000.png").read_bytes() for n in ("one", "many")}
    assert len(drawn) == 1  # nothing
    height, width = Image.open(source).size[::-1]
    assert all(r["segmentation"]["size"] == [height, width] for r in many)


def test_an_image_above_pillows_limit_is_read_for_tiles(config, photographs, tmp_path, capsys):
    usual = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = 1000
    try:
        with pytest.raises(SystemExit):
            predict(config, photographs / "000.png", tmp_path / "whole")
        said = capsys.readouterr().err
        assert "000.png cannot be read (Image size (" in said
        assert ". Try --tile-size\n" in said
        predict(config, photographs / "000.png", tmp_path / "tiles", "--tile-size", "100")
        assert Image.MAX_IMAGE_PIXELS == 1000
    finally:
        Image.MAX_IMAGE_PIXELS = usual
    assert results_of(tmp_path / "tiles")


def test_a_name_that_is_not_of_utf_8_is_escaped(config, photographs, tmp_path):
    source = os.fsencode(photographs) + b"/\xff\x1b[31m.png"
    os.rename(photographs / "000.png", source)
    (photographs / "\x1b]0;t\x07.png").write_text("no image")
    command = ["-m", "d2_memfit", "predict", "--config-file", config]
    run = run_forked(*command, "--input", photographs, "--output", tmp_path / "found")
    assert run.returncode == 3, run.stderr
    assert r"\x1b]0;t\x07.png cannot be read" in run.stderr
    assert not set(run.stdout + run.stderr) & set("\x1b\x07")
    names = {
        i["file_name"] for i in json.loads((tmp_path / "found/images.json").read_text())["images"]
    }
    assert names == {"\udcff\x1b[31m.png", "001.png"}


@pytest.mark.slow
def test_an_image_that_does_not_fit_is_a_line_and_fits_in_tiles(photographs, tmp_path):
    """Under a budget that the kernel enforces."""
    config = save_trained(tmp_path / "wide", MODEL__RESNETS__STEM_OUT_CHANNELS=128)
    Image.open(photographs / "000.png").resize((1800, 1800)).save(photographs / "large.jpg")
    command = ["-m", "d2_memfit", "predict", "--config-file", config]
    command += ["--input", photographs, "--budget", "1.2"]
    keys = ["INPUT.MIN_SIZE_TEST", "0"]
    run = run_forked(*command, "--output", tmp_path / "found", *keys)
    assert run.returncode == 3, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if "memory" in line]
    assert line.startswith(f"{photographs / 'large.jpg'} does not fit into memory: ")
    assert "2 images" in run.stdout
    run = run_forked(*command, "--output", tmp_path / "tiles", "--tile-size", "600", *keys)
    assert run.returncode == 0, run.stderr
    assert "3 images" in run.stdout


@pytest.mark.parametrize(
    "args",
    [
        "--input no/folder",
        "--input empty",
        "--min-score nan",
        "--budget nan",
        "--weights no.pth",
        "--config-file untrained.yaml",
        "MODEL.ROI_HEADS.NUM_CLASSES 7",
        "--coco two two.json images",
    ],
)
def test_what_is_wrong_is_one_line(
    args, prose, config, photographs, coins, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "untrained.yaml").write_text('MODEL: {WEIGHTS: ""}\n')
    two = json.loads((coins / "val.json").read_text())
    two["categories"].append({"id": 7, "name": "ring"})
    (tmp_path / "two.json").write_text(json.dumps(two))
    with pytest.raises(SystemExit) as e:
        predict(config, photographs, tmp_path / "found", *args.split(" "))
    assert e.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    prose(line, run=config.parent)
    assert not (tmp_path / "found").exists()


def test_keypoints_are_not_merged(photographs, tmp_path, capsys):
    config = save_trained(tmp_path / "keypoints", "keypoint_rcnn")
    predict(config, photographs / "000.png", tmp_path / "found")
    assert {len(r["keypoints"]) for r in results_of(tmp_path / "found")} == {6}
    with pytest.raises(SystemExit):
        predict(config, photographs / "000.png", tmp_path / "tiles", "--tile-size", "64")
    assert "--tile-size: keypoints of overlapping tiles" in capsys.readouterr().err


def test_a_lazy_config_says_how_images_are_resized(photographs, coins, tmp_path, capsys):
    """It may have no output_dir: --output takes its place."""
    config = tmp_path / "config.py"
    config.write_text(
        "from lazy_configs import lazy_config\n"
        "cfg = lazy_config(output_dir=None)\n"
        "model, optimizer = cfg.model, cfg.optimizer\n"
        "dataloader, train = cfg.dataloader, cfg.train\n"
    )
    model = tiny_model(tiny_cfg("faster_rcnn"))
    torch.save({"model": model.state_dict()}, tmp_path / "weights.pth")
    weights = ["--weights", tmp_path / "weights.pth"]
    predict(config, photographs, tmp_path / "found", *weights)
    assert "2 images" in capsys.readouterr().out
    image = read_image(str(photographs / "000.png"), "BGR")
    resized = ResizeShortestEdge(64, 100).get_transform(image).apply_image(image)
    pixels = torch.as_tensor(resized.transpose(2, 0, 1).copy())
    with torch.no_grad():
        expected = model.eval()([{"image": pixels}])[0]["instances"]
    found = [r["score"] for r in results_of(tmp_path / "found") if r["image_id"] == 1]
    assert found == expected.scores.tolist() != []
    LazyConfig.save(LazyConfig.load(str(config)), str(tmp_path / "config.yaml"))  # as a training
    predict(tmp_path / "config.yaml", photographs, tmp_path / "again", *weights)
    assert results_of(tmp_path / "again") == results_of(tmp_path / "found")
