# Copyright (c) the d2_memfit developers.
"""Containers that grow in a process with classes of any library."""

from d2_memfit.memory.containers import GrowingContainers


class Loading(dict):
    """Like transformers' mappings of models, whose values are imported when they are asked for."""

    def __len__(self):
        raise ValueError("a module cannot be imported")

    def values(self):
        raise ValueError("a module cannot be imported")


def test_methods_of_other_classes_are_not_called():
    kept = Loading({i: 0.5 for i in range(20)})
    growing = [kept] * 30
    containers = GrowingContainers(at_least=10)
    kept.update({i: Loading() for i in range(20, 50)})
    growing.extend([kept] * 20)
    found = containers.grown(15)
    assert {"a Loading of 50 elements", "a list of 50 elements"} <= found.keys()
