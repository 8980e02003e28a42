# Copyright (c) the d2_memfit developers.
"""What a config must say of a dataset: found, or compared with what the user says."""

import json

import pytest
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY

from d2_memfit.common.errors import ConfigError, DataError
from d2_memfit.config.load import load_cfg
from d2_memfit.data.coco_file import check_coco_file
from d2_memfit.data.settings import fit_to_data

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"


@pytest.fixture
def file_of(coins, tmp_path):
    """Makes a checked file out of the validation images of the coins, changed."""

    def make(change=lambda coco: None, name="changed"):
        coco = json.loads((coins / "val.json").read_text())
        change(coco)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(coco))
        return check_coco_file(name, str(path), str(coins / "val"), for_training=True)

    return make


def two_classes(coco):
    coco["categories"].append({"id": 2, "name": "note"})


def settings(cfg, train, test=(), given=()):
    return {s.key: s.value for s in fit_to_data(cfg, train, test, given) if s.key}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MASK, "MODEL.ROI_HEADS.NUM_CLASSES"),
        ("COCO-Detection/retinanet_R_50_FPN_3x", "MODEL.RETINANET.NUM_CLASSES"),
        ("COCO-Detection/rpn_R_50_FPN_1x", None),
    ],
)
def test_the_number_of_classes_is_that_of_the_data(file_of, config, key):
    cfg = load_cfg(config)
    found = settings(cfg, [file_of(two_classes)])
    assert found.get(key) == (2 if key else None)
    assert sum(name.endswith("NUM_CLASSES") for name in found) == (1 if key else 0)


def test_keys_and_classes_of_a_project_get_it_too_or_it_is_said(file_of, monkeypatch):
    cfg = load_cfg(MASK)
    cfg.MODEL.POINT_HEAD = CfgNode({"NUM_CLASSES": 80})
    found = settings(cfg, [file_of()])
    assert found["MODEL.POINT_HEAD.NUM_CLASSES"] == found["MODEL.ROI_HEADS.NUM_CLASSES"] == 1
    ours = type("Ours", (), {"num_classes_key": "MODEL.RETINANET.NUM_CLASSES"})
    monkeypatch.setitem(META_ARCH_REGISTRY._obj_map, "Ours", ours)
    cfg.MODEL.META_ARCHITECTURE = "Ours"
    assert settings(cfg, [file_of(two_classes)])["MODEL.RETINANET.NUM_CLASSES"] == 2
    cfg = load_cfg(MASK, ["MODEL.META_ARCHITECTURE", "MyModel"])
    notes = [str(s) for s in fit_to_data(cfg, [file_of()], [], ())]
    assert any("the key from which MyModel takes it" in note for note in notes)


def test_a_number_of_classes_that_the_user_gives_must_fit(prose, file_of):
    cfg = load_cfg(MASK, ["MODEL.ROI_HEADS.NUM_CLASSES", 3])
    given = {"MODEL.ROI_HEADS.NUM_CLASSES"}
    with pytest.raises(ConfigError, match="NUM_CLASSES 3") as training:
        fit_to_data(cfg, [file_of(two_classes)], [], given)
    with pytest.raises(ConfigError, match="NUM_CLASSES 3") as evaluation:
        fit_to_data(cfg, [], [file_of(two_classes)], given)
    prose(f"{training.value}\n{evaluation.value}")
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    assert "MODEL.ROI_HEADS.NUM_CLASSES" not in settings(cfg, [file_of(two_classes)], given=given)


def test_what_is_trained_on_and_evaluated_on_has_the_same_classes(prose, file_of):
    one, other = file_of(name="one"), file_of(two_classes, name="other")
    with pytest.raises(DataError, match="one and other") as e:
        fit_to_data(load_cfg(MASK), [one], [other], ())
    prose(str(e.value))


def drop_segmentations(coco, num=None):
    for a in coco["annotations"][:num]:
        del a["segmentation"]


def run_length_codes(coco):
    first = coco["annotations"][0]
    image = next(i for i in coco["images"] if i["id"] == first["image_id"])
    size = [image["height"], image["width"]]
    first["segmentation"] = {"size": size, "counts": [size[0] * size[1]]}


@pytest.mark.parametrize(
    ("change", "opts", "key"),
    [
        (drop_segmentations, [], r"MODEL\.MASK_ON"),
        (run_length_codes, [], r"INPUT\.MASK_FORMAT"),
        (lambda coco: None, ["MODEL.KEYPOINT_ON", True], r"MODEL\.KEYPOINT_ON"),
    ],
    ids=["mask", "code", "keypoint"],
)
def test_what_the_model_learns_from_must_be_there(prose, file_of, change, opts, key):
    with pytest.raises((ConfigError, DataError), match=key) as e:
        fit_to_data(load_cfg(MASK, opts), [file_of(change)], [], ())
    prose(str(e.value))


def test_a_file_to_evaluate_on_has_what_pycocotools_needs(prose, file_of):
    def without_area(coco):
        del coco["annotations"][0]["area"]

    def without_a_mask(coco):
        del coco["annotations"][0]["segmentation"]

    train = file_of(name="train")

    def odd(coco):
        coco["annotations"][0]["segmentation"] = [[1, 2, 3, 4]]

    def floats(coco):
        for image in coco["images"]:
            image["width"] = float(image["width"])

    for change in (odd, floats):
        file = file_of(change)
        with pytest.raises(DataError, match="no integer"):
            fit_to_data(load_cfg(MASK), [train], [file], ())
        fit_to_data(load_cfg(MASK), [file], [train], ())  # Detectron2 drops it, or needs none
    with pytest.raises(DataError, match="area") as area:
        fit_to_data(load_cfg(MASK), [train], [file_of(without_area)], ())
    with pytest.raises(DataError, match="mask") as mask:
        fit_to_data(load_cfg(MASK), [train], [file_of(without_a_mask)], ())
    prose(f"{area.value}\n{mask.value}")
    fit_to_data(load_cfg(MASK), [file_of(without_area)], [train], ())  # training needs none


def test_labels_of_pixels_are_not_in_a_coco_file(file_of):
    cfg = load_cfg("COCO-PanopticSegmentation/panoptic_fpn_R_50_3x")
    with pytest.raises(ConfigError, match="a PanopticFPN learns from labels of every pixel"):
        fit_to_data(cfg, [file_of()], [], ())


def test_keypoints_are_counted(file_of):
    def with_keypoints(coco):
        coco["categories"][0]["keypoints"] = ["left_edge", "right_edge"]
        for a in coco["annotations"]:
            a["keypoints"] = [1, 1, 2, 9, 9, 2]

    cfg = load_cfg("COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x")
    key = "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS"
    found = settings(cfg, [file_of(with_keypoints)])
    assert found[key] == 2
    assert len(found["TEST.KEYPOINT_OKS_SIGMAS"]) == 2
    with pytest.raises(ConfigError, match="NUM_KEYPOINTS 17 does not fit the data"):
        fit_to_data(cfg, [file_of(with_keypoints)], [], {key})


@pytest.mark.parametrize("points", [[1, 1, 2] * 3, [1, 1, 2, 9, 9], [None] * 6, 7, [1, 1, 2] * 2])
def test_keypoints_of_each_object_are_those_of_the_category(prose, file_of, points):
    def change(coco):
        coco["categories"][0]["keypoints"] = ["a", "b"]
        for a in coco["annotations"]:
            a["keypoints"] = points

    cfg, file = load_cfg("COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x"), file_of(change)
    with pytest.raises(DataError, match="keypoints") as e:
        fit_to_data(cfg, [file], [file], ())
    prose(str(e.value))


def test_categories_share_their_keypoints(file_of):
    def two(coco, other):
        coco["categories"] = [
            {"id": 1, "name": "cat", "keypoints": ["left", "right"]},
            {"id": 2, "name": "dog", "keypoints": other},
        ]
        for a in coco["annotations"]:
            a["keypoints"] = [1, 1, 2] * 2

    assert file_of(lambda coco: two(coco, ["left", "right"])).keypoint_names == ["left", "right"]
    with pytest.raises(DataError, match="categories have different keypoints"):
        file_of(lambda coco: two(coco, ["nose", "tail"]))


def test_the_schedule_is_that_of_a_fine_tuning(file_of):
    found = settings(load_cfg(MASK), [file_of()])  # 16 images, and 16 in each iteration
    assert found["SOLVER.MAX_ITER"] == 300
    assert found["SOLVER.STEPS"] == (225,)
    assert found["SOLVER.WARMUP_ITERS"] == 30
    assert found["SOLVER.CHECKPOINT_PERIOD"] == 100


def test_a_schedule_of_the_users_own_stays(file_of):
    cfg = load_cfg(MASK, ["SOLVER.MAX_ITER", 500, "SOLVER.STEPS", (400,)])
    given = {"SOLVER.MAX_ITER", "SOLVER.STEPS"}
    assert not [k for k in settings(cfg, [file_of()], given=given) if k.startswith("SOLVER")]
    cfg = load_cfg(MASK, ["SOLVER.MAX_ITER", 500])
    found = settings(cfg, [file_of()], given=["SOLVER.MAX_ITER"])
    assert (found["SOLVER.STEPS"], found["SOLVER.WARMUP_ITERS"]) == ((375,), 50)
    assert "SOLVER.STEPS" not in settings(load_cfg(MASK), [file_of()], given=["SOLVER.STEPS"])
    cfg = load_cfg(MASK, ["SOLVER.MAX_ITER", 200])  # for a dataset as large as the config's
    assert not [k for k in settings(cfg, [file_of()]) if k.startswith("SOLVER")]
