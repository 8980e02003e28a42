# Copyright (c) the d2_memfit developers.
"""A short vector in place of a gradient."""

import math

import pytest
import torch
from torch import nn

from d2_memfit.engine.losses import relative, sketch_of_gradients


def parameters_with(*gradients):
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(gradient.shape))
        parameter.grad = gradient
        made.append(parameter)
    return made


def test_distances_are_those_of_gradients_a_few_percent_apart():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1000, 700), (64,), (300, 300, 3)]
    one = [torch.randn(shape, generator=generator) for shape in shapes]
    for share in (1e-4, 1e-2, 1.0):
        other = [g + share * torch.randn(g.shape, generator=generator) for g in one]
        flat = [torch.cat([g.flatten() for g in of]) for of in (one, other)]
        sketches = [sketch_of_gradients(parameters_with(*of)) for of in (one, other)]
        expected = float((flat[1] - flat[0]).norm() / flat[0].norm())
        assert relative(sketches[1] - sketches[0], sketches[0]) == pytest.approx(expected, rel=0.05)


def test_a_constant_gradient_is_not_cancelled():
    """Rows of equal numbers would be, if they all had one sign pattern."""
    sketch = sketch_of_gradients(parameters_with(torch.ones(2_000_000)))
    assert float(sketch.norm()) == pytest.approx(math.sqrt(2_000_000), rel=0.1)


def test_the_gradient_of_a_small_model_is_kept():
    gradient = torch.randn(500)
    sketch = sketch_of_gradients(parameters_with(gradient))
    torch.testing.assert_close(sketch[:500].abs(), gradient.double().abs())
    assert not sketch[500:].any()


def test_sparse_and_missing_gradients():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    without = nn.Parameter(torch.zeros(3))
    sketch = sketch_of_gradients([without, embedding.weight])
    assert int(sketch.abs().sum()) == 8
    assert not sketch[:3].any()
