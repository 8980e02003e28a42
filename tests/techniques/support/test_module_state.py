# Copyright (c) the d2_memfit developers.
"""Which tensors are copied. tests/engine/test_state_of_models.py has all other kinds of state."""

import pytest
import torch
from torch import nn

from d2_memfit.techniques.support import ModuleState

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "changes", "is_copied"),
    [(MIB, False, True), (MIB + 1, False, False), (MIB + 1, True, True)],
    ids=["small", "large", "large and known to change"],
)
def test_large_tensors_are_copied_only_if_they_are_known_to_change(num_bytes, changes, is_copied):
    module = nn.Module()
    module.teacher = torch.zeros(num_bytes, dtype=torch.uint8)
    state = ModuleState(module, [module.teacher] if changes else [])
    module.teacher += 1
    state.restore()
    assert (int(module.teacher.max()) == 0) == is_copied
