# Copyright (c) the d2_memfit developers.
import numpy as np
import torch
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from tiny import image, tiny_cfg, tiny_model

from d2_memfit.job import resize_image


def test_annotations_go_with_the_image():
    original = image(0, size=100)
    original["sem_seg"] = torch.arange(100 * 100).reshape(100, 100) % 5
    smaller = resize_image(original, 0.5)
    before, after = original["instances"], smaller["instances"]
    assert smaller["image"].shape == (3, 50, 50)
    assert smaller["image"].dtype == torch.uint8
    assert after.image_size == (50, 50)
    torch.testing.assert_close(after.gt_boxes.tensor, before.gt_boxes.tensor / 2)
    torch.testing.assert_close(
        after.gt_keypoints.tensor[..., :2], before.gt_keypoints.tensor[..., :2] / 2
    )
    assert torch.equal(after.gt_keypoints.tensor[..., 2], before.gt_keypoints.tensor[..., 2])
    assert torch.equal(after.gt_classes, before.gt_classes)
    assert after.gt_masks.tensor.shape == (3, 50, 50)
    # Each mask still fills its box, up to a pixel at its sides.
    boxes = after.gt_masks.get_bounding_boxes().tensor
    assert (boxes - after.gt_boxes.tensor).abs().max() <= 1.5
    assert set(smaller["sem_seg"].unique().tolist()) <= set(range(5))
    assert smaller["sem_seg"].dtype == torch.int64
    assert (smaller["height"], smaller["width"]) == (100, 100)


def test_the_original_is_not_touched():
    original = image(0)
    boxes = original["instances"].gt_boxes.tensor.clone()
    resize_image(original, 0.7)
    assert original["image"].shape == (3, 64, 64)
    assert torch.equal(original["instances"].gt_boxes.tensor, boxes)


def test_height_and_width_are_scaled_by_what_they_became():
    instances = Instances((10, 15))
    instances.gt_boxes = Boxes(torch.tensor([[0.0, 0.0, 15.0, 10.0]]))
    instances.gt_masks = PolygonMasks([[np.array([0.0, 0.0, 15.0, 0.0, 15.0, 10.0])]])
    pixels = torch.zeros(3, 10, 15, dtype=torch.uint8)
    smaller = resize_image({"image": pixels, "instances": instances}, 0.7)
    height, width = smaller["image"].shape[1:]
    assert (height, width) == (7, 10)
    assert smaller["instances"].gt_boxes.tensor.tolist() == [[0, 0, 10, 7]]
    np.testing.assert_allclose(smaller["instances"].gt_masks.polygons[0][0], [0, 0, 10, 0, 10, 7])


def test_an_image_without_objects_can_be_resized():
    empty = image(0, num_instances=0)
    empty["instances"].gt_masks = BitMasks(torch.zeros(0, 64, 64, dtype=torch.bool))
    assert resize_image(empty, 0.7)["instances"].gt_masks.tensor.shape == (0, 45, 45)


def test_a_model_trains_on_it():
    model = tiny_model(tiny_cfg("mask_rcnn"))
    with EventStorage():
        sum(model([resize_image(image(0), 0.49)]).values()).backward()
