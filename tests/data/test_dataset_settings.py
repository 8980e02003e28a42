# Copyright (c) the d2_memfit developers.
"""What a config must say of a dataset: found, or compared with what the user says."""

import json
from dataclasses import replace

import pytest
from detectron2.config import CfgNode

from d2_memfit import get_cfg
from d2_memfit.config.load import load_cfg
from d2_memfit.data import check_coco_file, fit_to_data
from d2_memfit.errors import ConfigError, DataError

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


def test_keys_of_a_project_get_it_too(file_of):
    cfg = load_cfg(MASK)
    cfg.MODEL.POINT_HEAD = CfgNode({"NUM_CLASSES": 80})
    found = settings(cfg, [file_of()])
    assert found["MODEL.POINT_HEAD.NUM_CLASSES"] == found["MODEL.ROI_HEADS.NUM_CLASSES"] == 1
    cfg.MODEL.META_ARCHITECTURE = "OneStageDetector"
    assert "MODEL.ROI_HEADS.NUM_CLASSES" not in settings(cfg, [file_of()])


def test_models_of_transformers_have_the_key_of_the_heads(file_of):
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "TransformersDetector"
    notes = fit_to_data(cfg, [file_of(two_classes)], [], ())
    assert {s.key: s.value for s in notes}["MODEL.ROI_HEADS.NUM_CLASSES"] == 2
    assert not any("Set the key" in str(s) for s in notes)


def test_where_the_key_is_not_known_it_is_said(file_of):
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "MyModel"
    notes = [str(s) for s in fit_to_data(cfg, [file_of()], [], ())]
    assert any("the key from which MyModel takes it" in note for note in notes)


def test_a_number_of_classes_that_the_user_gives_must_fit(file_of):
    cfg = load_cfg(MASK, ["MODEL.ROI_HEADS.NUM_CLASSES", 3])
    given = {"MODEL.ROI_HEADS.NUM_CLASSES"}
    with pytest.raises(ConfigError, match=r"NUM_CLASSES 3 does not fit the data: .* has 2 categ"):
        fit_to_data(cfg, [file_of(two_classes)], [], given)
    with pytest.raises(ConfigError, match=r"Name a file with the classes of the trained model$"):
        fit_to_data(cfg, [], [file_of(two_classes)], given)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    assert "MODEL.ROI_HEADS.NUM_CLASSES" not in settings(cfg, [file_of(two_classes)], given=given)


def test_what_is_trained_on_and_evaluated_on_has_the_same_classes(file_of):
    one, other = file_of(name="one"), file_of(two_classes, name="other")
    with pytest.raises(
        DataError, match=r"one and other have different categories: coin in .*coin, n"
    ):
        fit_to_data(load_cfg(MASK), [one], [other], ())


def drop_segmentations(coco, num=None):
    for a in coco["annotations"][:num]:
        del a["segmentation"]


def run_length_codes(coco):
    first = coco["annotations"][0]
    image = next(i for i in coco["images"] if i["id"] == first["image_id"])
    size = [image["height"], image["width"]]
    first["segmentation"] = {"size": size, "counts": [size[0] * size[1]]}


@pytest.mark.parametrize(
    ("change", "opts", "message"),
    [
        (drop_segmentations, [], r"MODEL.MASK_ON is True, but (\d+) of \1 objects have no mask"),
        (
            lambda coco: drop_segmentations(coco, 2),
            [],
            r"^changed, .*json: .* 2 of \d+ objects have no mask\. .*: id 1 of ",
        ),
        (
            run_length_codes,
            [],
            r"INPUT.MASK_FORMAT is polygon, but 1 of \d+ masks are run-length co",
        ),
        (
            lambda coco: None,
            ["MODEL.KEYPOINT_ON", True],
            r"KEYPOINT_ON is True, but (\d+) of \1 objects have no keypoints",
        ),
    ],
)
def test_what_the_model_learns_from_must_be_there(file_of, change, opts, message):
    with pytest.raises((ConfigError, DataError), match=message):
        fit_to_data(load_cfg(MASK, opts), [file_of(change)], [], ())


def test_a_file_to_evaluate_on_has_what_pycocotools_needs(file_of):
    def without_area(coco):
        del coco["annotations"][0]["area"]

    def without_a_mask(coco):
        del coco["annotations"][0]["segmentation"]

    train = file_of(name="train")
    with pytest.raises(DataError, match=r"changed cannot be evaluated: 1 annotations .* no area"):
        fit_to_data(load_cfg(MASK), [train], [file_of(without_area)], ())
    with pytest.raises(DataError, match=r"^changed, .*json: .* 1 of \d+ objects have no mask"):
        fit_to_data(load_cfg(MASK), [train], [file_of(without_a_mask)], ())
    fit_to_data(load_cfg(MASK), [file_of(without_area)], [train], ())  # training needs none


def test_boxes_must_have_a_size(file_of):
    def without_size(coco, num=None):
        for a in coco["annotations"][:num]:
            a["bbox"] = [1, 1, 0, 0]

    cfg = load_cfg(MASK)
    fit_to_data(cfg, [file_of(lambda coco: without_size(coco, 2))], [], ())  # the trainer warns
    with pytest.raises(DataError, match=r"^changed, .*json: (\d+) of \1 boxes have no area"):
        fit_to_data(cfg, [file_of(without_size)], [], ())


def test_empty_polygons_are_no_masks(file_of):
    def empty(coco, num=None):
        for a in coco["annotations"][:num]:
            a["segmentation"] = [[]]

    with pytest.raises(DataError, match="objects have a mask without a polygon of three corners"):
        fit_to_data(load_cfg(MASK), [file_of(empty)], [], ())
    fit_to_data(load_cfg(MASK), [file_of(lambda coco: empty(coco, 2))], [], ())  # the trainer warns


def test_labels_of_pixels_are_not_in_a_coco_file(file_of):
    cfg = load_cfg("COCO-PanopticSegmentation/panoptic_fpn_R_50_3x")
    with pytest.raises(ConfigError, match="a PanopticFPN learns from labels of every pixel"):
        fit_to_data(cfg, [file_of()], [], ())


@pytest.mark.parametrize(
    ("change", "opts"),
    [
        (drop_segmentations, ["MODEL.MASK_ON", False]),
        (run_length_codes, ["INPUT.MASK_FORMAT", "bitmask"]),
    ],
)
def test_what_the_model_does_not_use_may_be_missing(file_of, change, opts):
    fit_to_data(load_cfg(MASK, opts), [file_of(change)], [], ())


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


def test_categories_share_their_keypoints(file_of):
    def two(coco, other):
        coco["categories"] = [
            {"id": 1, "name": "cat", "keypoints": ["left", "right"]},
            {"id": 2, "name": "dog", "keypoints": other},
        ]
        for a in coco["annotations"]:
            a["keypoints"] = [1, 1, 2] * 2

    assert file_of(lambda coco: two(coco, ["left", "right"])).keypoint_names == ("left", "right")
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
    found = settings(load_cfg(MASK, ["SOLVER.MAX_ITER", 500]), [file_of()], given=given)
    assert "SOLVER.STEPS" not in found  # given
    found = settings(
        load_cfg(MASK, ["SOLVER.MAX_ITER", 500]), [file_of()], given=["SOLVER.MAX_ITER"]
    )
    assert found["SOLVER.STEPS"] == (375,)
    assert found["SOLVER.WARMUP_ITERS"] == 50
    cfg = load_cfg(MASK, ["SOLVER.MAX_ITER", 220_000])  # the first of two steps comes before it
    assert settings(cfg, [file_of()], given=["SOLVER.MAX_ITER"])["SOLVER.STEPS"] == (165_000,)


def test_as_many_iterations_as_for_coco_get_a_word(file_of):
    notes = [str(s) for s in fit_to_data(load_cfg(MASK), [file_of()], [], ["SOLVER.MAX_ITER"])]
    assert any("SOLVER.MAX_ITER 270000 is kept: 270,000 epochs of 16 images" in n for n in notes)


def test_a_data_set_as_large_as_the_recipes_keeps_the_recipe(file_of):
    cfg = load_cfg(MASK, ["SOLVER.MAX_ITER", 200])
    (note,) = (s for s in fit_to_data(cfg, [file_of()], [], ()) if not s.key)
    assert str(note).startswith("SOLVER.MAX_ITER 200 is from the config: 200.0 epochs of 16 images")


def test_a_dataset_to_evaluate_on_without_objects_is_told_before_training(file_of, coins):
    file = check_coco_file("val", str(coins / "val.json"), None, for_training=True)
    empty = replace(file, summary=replace(file.summary, num_objects=0))
    notes = [str(s) for s in fit_to_data(load_cfg(MASK), [file], [empty], ())]
    assert f"{file.json_file} has no objects, so evaluation on val gives no AP" in notes
