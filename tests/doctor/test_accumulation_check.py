# Copyright (c) the d2_memfit developers.
"""The images that the doctor cuts into micro-batches."""

import torch
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks

from d2_memfit.doctor.accumulation_check import five_images

SIZE = (96, 96)


def image_with_one_object():
    masks = torch.zeros(1, *SIZE, dtype=torch.bool)
    masks[0, 8:16, 8:16] = True
    fields = {
        "gt_boxes": Boxes(torch.tensor([[8.0, 8.0, 16.0, 16.0]])),
        "gt_masks": PolygonMasks([[torch.tensor([8.0, 8.0, 16.0, 8.0, 16.0, 16.0]).numpy()]]),
        "bitmasks": BitMasks(masks),
        "gt_keypoints": Keypoints(torch.tensor([[[9.0, 9.0, 2.0]]])),
        "gt_classes": torch.tensor([3]),
    }
    return {"image": torch.zeros(3, *SIZE), "instances": Instances(SIZE, **fields)}


def test_one_object_comes_again_in_other_places():
    """In one place objects would match the same anchors, so that no count would differ."""
    images = five_images([image_with_one_object()])
    assert [len(d["instances"]) for d in images] == [10, 3, 1, 0, 5]
    fields = images[0]["instances"].get_fields()
    assert fields.pop("gt_classes").tolist() == [3] * 10
    places = {
        "gt_boxes": fields["gt_boxes"].tensor.tolist(),
        "gt_masks": [polygons[0].tolist() for polygons in fields["gt_masks"].polygons],
        "bitmasks": fields["bitmasks"].tensor.flatten(1).tolist(),
        "gt_keypoints": fields["gt_keypoints"].tensor.tolist(),
    }
    assert places.keys() == fields.keys()
    for name, values in places.items():
        assert len(set(map(str, values))) == 10, name
