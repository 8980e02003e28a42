import json

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog

from d2_memfit import get_cfg
from d2_memfit.errors import ConfigError
from d2_memfit.planner.batches import evaluation_batch, tensors_of, training_batch
from d2_memfit.planner.worst_case import worst_case


def make_cfg(**keys):
    cfg = get_cfg()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (), ()
    cfg.merge_from_list([x for k, v in keys.items() for x in (k.replace("__", "."), v)])
    return cfg


@pytest.fixture
def dataset():
    """A landscape, a portrait with many objects, and a crowd, which does not count."""

    def dicts():
        def image(height, width, crowds):
            return {
                "height": height,
                "width": width,
                "annotations": [{"iscrowd": c} for c in crowds],
            }

        return [image(480, 640, [0] * 3), image(1000, 500, [0] * 7), image(600, 600, [1] * 50)]

    DatasetCatalog.register("worst_case_test", dicts)
    yield "worst_case_test"
    DatasetCatalog.remove("worst_case_test")


def test_without_a_dataset_images_have_any_shape_and_100_instances_and_it_is_said():
    cfg = make_cfg(DATASETS__TRAIN=("nobody_has_it",), INPUT__MIN_SIZE_TRAIN=(640, 800))
    case = worst_case(cfg)
    assert sorted(case.image_sizes[0]) == [800, 1333]
    assert case.num_instances == 100
    assert "nobody_has_it" in case.assumptions[0]


def test_a_shorter_side_is_a_number_or_several_as_for_detectron2():
    cfg = make_cfg()
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = 640, (400, 600)
    case = worst_case(cfg)
    assert sorted(case.image_sizes[0]) == [640, 1333]
    assert sorted(case.test_size) == [600, 1333]


def test_a_dataset_says_how_large_and_how_crowded_its_images_are(dataset):
    case = worst_case(make_cfg(DATASETS__TRAIN=(dataset,), DATASETS__TEST=(dataset,)))
    # The portrait, which INPUT.MAX_SIZE_TRAIN limits, beside the square; the landscape meets none.
    assert case.image_sizes == ((1333, 667), (800, 800))
    assert case.size_alone == (1333, 667)
    assert case.num_instances == 7
    assert case.original_size == (1000, 500)
    assert case.assumptions == ()


def test_without_grouping_both_orientations_meet_in_a_batch(dataset):
    cfg = make_cfg(DATASETS__TRAIN=(dataset,), DATALOADER__ASPECT_RATIO_GROUPING=False)
    case = worst_case(cfg)
    assert max(h for h, _ in case.image_sizes) == 1333
    assert max(w for _, w in case.image_sizes) == 1067
    batch = training_batch(cfg, case, 3)
    assert [tuple(d["image"].shape[1:]) for d in batch] == [*case.image_sizes, case.image_sizes[0]]


@pytest.fixture
def panorama():
    """Beside an ordinary landscape, and a narrow portrait."""
    sizes = [(480, 640), (300, 900), (900, 270)]
    dicts = [{"height": h, "width": w, "annotations": []} for h, w in sizes]
    DatasetCatalog.register("panorama_test", lambda: dicts)
    yield "panorama_test"
    DatasetCatalog.remove("panorama_test")


def test_images_of_one_group_are_padded_to_each_other(panorama):
    case = worst_case(make_cfg(DATASETS__TRAIN=(panorama,)))
    assert case.image_sizes == ((800, 1067), (444, 1333))
    assert case.size_alone == (800, 1067)


def test_a_micro_batch_of_one_has_the_largest_single_image(panorama):
    cfg = make_cfg(DATASETS__TRAIN=(panorama,), DATALOADER__ASPECT_RATIO_GROUPING=False)
    case = worst_case(cfg)
    assert case.image_sizes == ((1333, 400), (444, 1333))
    (image,) = training_batch(cfg, case, 1)
    assert image["image"].shape == (3, 800, 1067)


def test_groups_meet_in_micro_batches_of_several_batches(panorama):
    keys = {"SOLVER__IMS_PER_BATCH": 4, "SOLVER__ACCUMULATION_STEPS": 2}
    apart = make_cfg(DATASETS__TRAIN=(panorama,), MEMFIT__MICRO_BATCH=2, **keys)
    assert worst_case(apart).image_sizes == ((800, 1067), (444, 1333))
    together = make_cfg(DATASETS__TRAIN=(panorama,), MEMFIT__MICRO_BATCH=3, **keys)
    assert worst_case(together).image_sizes == ((1333, 400), (444, 1333))


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("absolute", [300, 300], (800, 800)),
        ("relative", [0.5, 0.5], (1333, 667)),
        ("relative_range", [0.5, 0.5], (1333, 1333 * 0.5)),
        ("absolute_range", [200, 400], (1333, 667)),
    ],
)
def test_crops_come_before_resizing(dataset, kind, size, expected):
    cfg = make_cfg(DATASETS__TRAIN=(dataset,))
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.CROP.TYPE, cfg.INPUT.CROP.SIZE = True, kind, size
    height, width = worst_case(cfg).image_sizes[0]
    assert np.prod([height, width]) == pytest.approx(np.prod(expected), rel=0.6)
    assert max(height, width) <= 1333


def test_images_in_their_own_size_need_a_dataset(dataset):
    cfg = make_cfg(INPUT__MIN_SIZE_TRAIN=(0,))
    with pytest.raises(ConfigError, match=r"INPUT.MIN_SIZE_TRAIN 0 leaves images in their own"):
        worst_case(cfg)
    cfg.DATASETS.TRAIN = (dataset,)
    assert worst_case(cfg).image_sizes == ((1000, 500), (600, 600))


def test_a_batch_has_what_the_models_ask_for():
    cfg = make_cfg()
    cfg.MODEL.MASK_ON = cfg.MODEL.KEYPOINT_ON = cfg.MODEL.LOAD_PROPOSALS = True
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.MODEL.META_ARCHITECTURE = "PanopticFPN"
    case = worst_case(cfg)
    (image,) = training_batch(cfg, case, 1)
    assert len(image["instances"]) == 100
    assert image["instances"].gt_masks.tensor.shape == (100, *case.image_sizes[0])
    assert image["sem_seg"].shape == image["image"].shape[1:]
    assert len(image["proposals"]) == cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN
    assert sum(t.nbytes for t in tensors_of([image])) > 100 * 800 * 1333
    (image,) = evaluation_batch(cfg, case)
    assert "instances" not in image
    assert len(image["proposals"]) == cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST


def test_a_coco_file_that_is_missing_is_no_error(tmp_path):
    from d2_memfit.data import register_coco

    missing = tmp_path / "missing.json"
    register_coco("worst_case_missing", str(missing), str(tmp_path))
    cfg = make_cfg(DATASETS__TRAIN=("worst_case_missing",))
    assert worst_case(cfg).num_instances == 100
    info = {"id": 1, "file_name": "1.jpg", "height": 30, "width": 40}
    box = {"bbox": [1, 1, 5, 5], "category_id": 1, "image_id": 1, "iscrowd": 0, "area": 25}
    coco = {"images": [info], "categories": [{"id": 1, "name": "coin"}]}
    coco["annotations"] = [{**box, "id": i} for i in range(4)]
    missing.write_text(json.dumps(coco))
    assert worst_case(cfg).num_instances == 4
    assert torch.is_tensor(training_batch(cfg, worst_case(cfg), 1)[0]["image"])
