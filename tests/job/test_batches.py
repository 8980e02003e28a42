# Copyright (c) the d2_memfit developers.
"""Batches with other numbers of objects."""

import pytest
import torch
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from tiny import images, tiny_cfg

from d2_memfit.job import Job, mask_bytes_per_object, objects_per_image, with_objects
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob


@pytest.mark.parametrize("num", [2, 3, 8])
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
    (image,) = with_objects([{"image": torch.zeros(3, 8, 8), "instances": instances}], num)
    made = image["instances"]
    index = [i % 3 for i in range(num)]
    assert objects_per_image([image]) == [num]
    assert made.gt_classes.tolist() == index
    assert torch.equal(made.gt_boxes.tensor, boxes[index])
    assert torch.equal(made.gt_keypoints.tensor, instances.gt_keypoints.tensor[index])
    assert torch.equal(made.gt_rotated.tensor, instances.gt_rotated.tensor[index])
    assert [polygons[0][0] for polygons in made.gt_masks.polygons] == index
    assert made.names == ["abc"[i] for i in index]


def test_repeated_masks_have_one_pixel():
    batch = images(2, num_instances=3)
    for image in batch:
        image["instances"].remove("gt_keypoints")
    assert mask_bytes_per_object(batch) == 2 * 64 * 64
    made = with_objects(batch, 5)[1]["instances"].gt_masks.tensor
    assert torch.equal(made[:3], batch[1]["instances"].gt_masks.tensor)
    assert made[3:].sum((1, 2)).tolist() == [1, 1]
    few = with_objects(batch, 2)[1]["instances"].gt_masks.tensor
    assert torch.equal(few, batch[1]["instances"].gt_masks.tensor[:2])


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, 3),
        [{"image": torch.zeros(3, 8, 8)}],
        [*images(1), *images(1, num_instances=0)],
        [{"instances": [1, 2]}],
    ],
)
def test_images_without_instances_have_no_number(batch):
    assert objects_per_image(batch) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mask_format"),
    [("mask_rcnn", "polygon"), ("mask_rcnn", "bitmask"), ("retinanet", "polygon")],
)
def test_memory_is_that_of_as_many_objects_from_the_mapper(family, mask_format):
    """But for what depends on where boxes are, such as the anchors on objects."""
    cfg = tiny_cfg(family, fpn=family != "retinanet")
    cfg.INPUT.MASK_FORMAT, cfg.SOLVER.IMS_PER_BATCH = mask_format, 2
    few, many = (
        DryJob(Job.from_cfg(cfg, 1, num_instances=num), DeviceModel.load("cuda"), evaluates=False)
        for num in (20, 70)
    )
    assert objects_per_image(few.job.training_batch()) == [20, 20]
    repeated = few.with_batch(with_objects(few.job.training_batch(), 70), {})
    peaks = [job.use().allocated_bytes for job in (few, repeated, many)]
    assert peaks[1] == pytest.approx(peaks[2], rel=0.01)
    assert peaks[1] > 1.02 * peaks[0]
