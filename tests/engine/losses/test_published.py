# Copyright (c) the d2_memfit developers.
"""The distances that are stated for losses of well-known code."""

import pytest
import torch

from d2_memfit.engine.losses import Published, published

CODE = "def losses(x):\n    return x.mean()"


@pytest.mark.parametrize(("package", "distance"), [("detectron2", 0.3), ("opendet2", 0.0)])
def test_a_project_with_the_folders_of_detectron2_has_code_of_its_own(package, distance):
    file = f"/projects/{package}/modeling/roi_heads/fast_rcnn.py"
    names = {}
    exec(compile(CODE, file, "exec"), names)
    with torch.autograd.detect_anomaly(check_nan=False):
        loss = 2 * names["losses"](torch.ones(2, requires_grad=True))
    found = published("loss_cls_ic", loss)
    assert found.distance == distance
    assert (found == Published()) == (not distance)
