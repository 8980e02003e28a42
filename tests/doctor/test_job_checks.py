# Copyright (c) the d2_memfit developers.
"""Single checks of a job."""

import re

import pytest
from tiny import tiny_cfg

from d2_memfit import Job
from d2_memfit.doctor.job_checks import is_estimated
from d2_memfit.doctor.patient import Unwell

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_an_estimate_of_smaller_images_than_there_are_is_told_to_be_too_low(coins):
    cfg = tiny_cfg("retinanet", image_size=128, fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.SOLVER.IMS_PER_BATCH = 2
    assert re.search(r"\((.[\d.]+)%\)$", is_estimated(Job.from_cfg(cfg, 1)))
    with pytest.raises(Unwell, match=r"\(-[2-9]\d.*Plan for a budget that is smaller"):
        is_estimated(Job.from_cfg(cfg, 1, image_size=(80, 80)))
