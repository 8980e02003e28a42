# Copyright (c) the d2_memfit developers.
"""Batches with other numbers of objects, and images of other sizes."""

import pytest
import torch
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from tiny import image

from d2_memfit.job import objects_in, resize_image, with_objects


@pytest.mark.parametrize("num", [2, 8])
def test_objects_are_repeated_in_all_fields(num):
    boxes = torch.arange(12.0).reshape(3, 4)
    instances = Instances(
        (8, 8),
        gt_boxes=Boxes(boxes),
        gt_rotated=RotatedBoxes(torch.arange(15.0).reshape(3, 5)),
        gt_classes=torch.arange(3),
        gt_masks=PolygonMasks([[[i, 0.0, i, 1, i, 2]] for i in range(3)]),
        gt_keypoints=Keypoints(torch.arange(9.0).reshape(3, 1, 3)),
        names=["a", "b", "c"],
    )
    image = with_objects({"image": torch.zeros(3, 8, 8), "instances": instances}, num)
    made = image["instances"]
    index = [i % 3 for i in range(num)]
    assert objects_in(image) == num
    assert made.gt_classes.tolist() == index
    assert torch.equal(made.gt_boxes.tensor, boxes[index])
    assert torch.equal(made.gt_keypoints.tensor, instances.gt_keypoints.tensor[index])
    assert torch.equal(made.gt_rotated.tensor, instances.gt_rotated.tensor[index])
    assert [polygons[0][0] for polygons in made.gt_masks.polygons] == index
    assert made.names == ["abc"[i] for i in index]


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
