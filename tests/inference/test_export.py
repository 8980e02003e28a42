# Copyright (c) the d2_memfit developers.
import pytest
import torch
from detectron2.engine import DefaultPredictor
from forks import run_forked
from PIL import Image
from trained import save_trained

from d2_memfit.cli.commands import main
from d2_memfit.config import load_cfg

pytestmark = pytest.mark.slow


@pytest.fixture
def photograph(coins, tmp_path):
    Image.open(coins / "val" / "000.png").convert("RGB").save(tmp_path / "photograph.png")
    return tmp_path / "photograph.png"


def export(config, photograph, to):
    args = ["--config-file", config, "--input", photograph, "--output", to]
    main(["export", *map(str, args)])


@pytest.mark.parametrize(
    ("family", "fpn"),
    [
        ("mask_rcnn", False),
        *(
            pytest.param(family, True, marks=pytest.mark.long)
            for family in ("mask_rcnn", "retinanet", "keypoint_rcnn")
        ),
    ],
)
def test_torchscript_finds_what_the_model_finds(family, fpn, photograph, tmp_path, capsys):
    config = save_trained(tmp_path / family, family, fpn)
    export(config, photograph, tmp_path / "model.ts")
    printed = capsys.readouterr().out
    assert printed.startswith(f"Written: {tmp_path / 'model.ts'} (20 objects in 2 images")
    code = printed.splitlines()[1].removeprefix("Next, load it: ")
    assert run_forked("-c", code).returncode == 0
    cfg = load_cfg(str(config))
    cfg.MODEL.WEIGHTS = str(config.parent / "model_final.pth")
    image = torch.rand(3, 96, 160) * 255  # another size than that of the photograph
    with torch.no_grad():
        expected = DefaultPredictor(cfg).model([{"image": image}])[0]["instances"]
    boxes, classes, *_ = torch.jit.load(tmp_path / "model.ts")(image)
    assert torch.allclose(boxes, expected.pred_boxes.tensor, atol=1e-3)
    assert torch.equal(classes, expected.pred_classes)


def test_onnx_finds_what_the_model_finds(photograph, tmp_path, capsys):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    config = save_trained(tmp_path / "trained")
    export(config, photograph, tmp_path / "model.onnx")
    assert "20 objects in 2 images" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    boxes = session.run(None, {"image": torch.zeros(3, 96, 160).numpy()})[0]
    assert boxes.shape[1] == 4


@pytest.mark.parametrize(
    ("family", "suffix", "message", "keys"),
    [
        ("proposal_network", ".ts", "its result has more than a list of objects)", {}),
        (
            *(
                "mask_rcnn",
                ".ts",
                "this PanopticFPN cannot be exported as .ts (ValueError: its resu",
            ),
            {"MODEL__META_ARCHITECTURE": "PanopticFPN", "fpn": True},
        ),
        (
            *("mask_rcnn", ".ts", "the model finds no objects in --input: name an image with some"),
            {"MODEL__ROI_HEADS__SCORE_THRESH_TEST": 1.0},
        ),
        ("keypoint_rcnn", ".onnx", "this GeneralizedRCNN cannot be exported as .onnx (", {}),
        ("mask_rcnn", ".pt", "must end in .onnx or .ts", {}),
    ],
)
def test_what_cannot_be_exported_is_a_line_and_leaves_no_file(
    family, suffix, message, keys, photograph, tmp_path, capfd
):
    if suffix == ".onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    config = save_trained(tmp_path / family, family, **keys)
    before = set(tmp_path.iterdir())
    with pytest.raises(SystemExit) as e:
        export(config, photograph, tmp_path / f"model{suffix}")
    assert e.value.code == 2
    printed = capfd.readouterr()
    (line,) = [x for x in printed.err.splitlines() if x.startswith("error: ")]
    assert message in line
    assert printed.out == ""  # C++ has the graph to print
    assert set(tmp_path.iterdir()) == before


def test_a_file_that_finds_something_else_is_not_kept(photograph, tmp_path, monkeypatch, capsys):
    """The check is one: a tracer that ties the file to the size of the image is found out."""
    config = save_trained(tmp_path / "trained")
    trace = torch.jit.trace

    def of_one_size(adapter, inputs, **kwargs):
        (image,) = inputs
        height, width = image.shape[1:]
        resize = torch.nn.Upsample(size=(height, width))

        class Fixed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.adapter = adapter

            def forward(self, image):
                return self.adapter(resize(image[None])[0])

        return trace(Fixed(), inputs, **kwargs)

    monkeypatch.setattr(torch.jit, "trace", of_one_size)
    with pytest.raises(SystemExit):
        export(config, photograph, tmp_path / "model.ts")
    assert "cannot be exported as .ts (ValueError: its boxes differ by " in capsys.readouterr().err
    assert not (tmp_path / "model.ts").exists()
