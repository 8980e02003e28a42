# Copyright (c) the d2_memfit developers.
import sys

import torch

from d2_memfit.techniques.support import ReplacesInForward, add_mixin

THIS = sys.modules[__name__]


def one():
    return 1


def ten():
    return 10


class Sum(torch.nn.Module):
    def forward(self):
        return one() + ten()


class MoreOfOne(ReplacesInForward):
    def replaced(self):
        return [([THIS], {"one": lambda original: lambda: original() + 1})]


class MoreOfTen(ReplacesInForward):
    def replaced(self):
        return [([THIS], {"ten": lambda original: lambda: original() + 10})]


def test_what_each_mixin_of_a_module_replaces_is_replaced():
    module = Sum()
    add_mixin(module, MoreOfOne)
    assert module() == 12
    add_mixin(module, MoreOfTen)
    assert module() == 22
    assert Sum()() == 11
