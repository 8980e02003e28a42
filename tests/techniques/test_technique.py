# Copyright (c) the d2_memfit developers.
import copy
import io

import torch

from d2_memfit.common.patching import replaced_functions, source_files
from d2_memfit.techniques.technique import wrap_method


def times(module, forward, factor, x):
    return forward(x) * factor


def plus(module, forward, summand, x):
    return forward(x) + summand


def test_copies_and_pickles_have_both_and_weights_of_their_own():
    module, x = torch.nn.Linear(3, 2), torch.rand(4, 3)
    wrap_method(module, "forward", times, 10)
    wrap_method(module, "forward", plus, 1)
    expected = torch.nn.functional.linear(x, module.weight, module.bias) * 10 + 1
    assert list(module.state_dict()) == ["weight", "bias"]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.weight.zero_()
            other.bias.zero_()
        assert (other(x) == 1).all()
        assert torch.equal(module(x), expected)


def double(x):
    return 2 * x


class Doubling(torch.nn.Module):
    def forward(self, x):
        return double(x)


def test_functions_are_replaced_in_the_file_of_a_model():
    module, original = Doubling(), double
    more = {"double": lambda double: lambda x: double(x) + 1, "no_such_function": str}
    with replaced_functions((source_files(module.modules()), more)):
        assert module(3) == 7
    assert module(3) == 6
    assert double is original
