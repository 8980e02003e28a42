# Copyright (c) the d2_memfit developers.
"""Names of 0.1.0 that still work."""

import pytest
import torch
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, estimate_memory


def test_images_per_micro_batch_is_the_micro_batch_size():
    model = tiny_model(tiny_cfg())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(DeprecationWarning, match="images_per_micro_batch is deprecated"):
        trainer = AccumulatingTrainer(model, [images(2)], optimizer, images_per_micro_batch=1)
    assert trainer.micro_batch_size == 1
    with pytest.warns(DeprecationWarning, match="it is micro_batch_size now"):
        assert trainer.images_per_micro_batch == 1
    estimate = estimate_memory(tiny_cfg())
    with pytest.warns(DeprecationWarning, match="it is micro_batch_size now"):
        assert estimate.images_per_micro_batch == estimate.micro_batch_size
