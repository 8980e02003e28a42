import copy
import io

import torch

from d2_memfit.techniques.modules import extend


class Multiplying:
    factor: int

    def forward(self, x):
        return super().forward(x) * self.factor


class Adding:
    summand: int

    def forward(self, x):
        return super().forward(x) + self.summand


def extended():
    """A module with two extensions."""
    module = torch.nn.Linear(3, 2)
    extend(module, Multiplying, factor=10)
    extend(module, Adding, summand=1)
    return module


def test_it_is_an_instance_of_its_own_class_with_its_own_names():
    module, x = extended(), torch.rand(4, 3)
    assert isinstance(module, torch.nn.Linear)
    assert type(module).__name__ == "Linear"
    assert list(module.state_dict()) == ["weight", "bias"]
    assert torch.equal(
        module(x), torch.nn.functional.linear(x, module.weight, module.bias) * 10 + 1
    )


def test_copies_and_pickles_are_extended_and_have_weights_of_their_own():
    module, x = extended(), torch.rand(4, 3)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), module(x))
        with torch.no_grad():
            other.weight.zero_()
            other.bias.zero_()
        assert (other(x) == 1).all()
        assert (module(x) != 1).any()
