# Copyright (c) the d2_memfit developers.
"""Images of a window: taken, cut, put back, in every kind of batch."""

from typing import Any, NamedTuple

import pytest
import torch
from injection import iterate

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.errors import ConfigError
from d2_memfit.engine.window import Window, as_given, count_images

BATCHES = [[{"image_id": i} for i in ids] for ids in ((0, 1, 2, 3), (4, 5, 6), (7,))]


def ids(micro_batch):
    return [image["image_id"] for image in micro_batch.data]


def taken(window, *sizes, across_batches=True):
    """Micro-batches of these sizes, the last one again and again until the window's end."""
    sizes = list(sizes)
    found = []
    while (m := window.take(sizes[0], across_batches)) is not None:
        found.append(ids(m))
        if len(sizes) > 1:
            sizes.pop(0)
    return found


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("across_batches", "expected"),
    [(True, [[0, 1, 2], [3, 4, 5], [6, 7]]), (False, [[0, 1, 2], [3], [4, 5, 6], [7]])],
)
def test_images_come_in_the_loaders_order(is_loaded, across_batches, expected):
    window = Window(iter(BATCHES), 3)
    if is_loaded:
        window.load_all()
    assert taken(window, 3, across_batches=across_batches) == expected
    assert window.num_images == 8
    assert window.expected_images == 12  # three times the first batch


@pytest.mark.parametrize("is_loaded", [False, True])
def test_images_put_back_come_next_in_smaller_pieces(is_loaded):
    window = Window(iter(BATCHES), 3)
    if is_loaded:
        window.load_all()
    assert ids(window.take(3)) == [0, 1, 2]
    window.put_back()
    assert taken(window, 1, 2) == [[0], [1, 2], [3, 4], [5, 6], [7]]
    window.put_all_back()
    assert taken(window, 8) == [list(range(8))]


def test_of_two_equal_images_the_one_that_is_meant_is_replaced():
    one, other = {"image_id": 0}, {"image_id": 0}
    window = Window(iter([[one, other]]), 1)
    window.load_all()
    window.replace(other, {"image_id": 1})
    assert taken(window, 2) == [[0, 1]]


class Pair(NamedTuple):
    images: Any
    targets: Any


def dicts(*numbers):
    return [{"image_id": n, "file_name": f"{n}.png"} for n in numbers]


def columns(kind, *numbers):
    """A batch of images with targets."""
    if kind == "tensors":
        return torch.tensor([[float(n)] for n in numbers]), torch.tensor(numbers) * 10
    if kind == "tuples":
        return tuple(torch.tensor([float(n)]) for n in numbers), tuple(dicts(*numbers))
    pair = [torch.tensor([float(n)]) for n in numbers], dicts(*numbers)
    return {"lists": pair, "a named tuple": Pair(*pair)}[kind]


KINDS = ["lists", "tuples", "tensors", "a named tuple"]


def assert_same(actual, expected):
    assert repr(actual) == repr(expected)  # values, and types at each level


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_cut_and_joined_across_batches(kind):
    window = Window(iter([columns(kind, 0, 1, 2), columns(kind, 3, 4, 5)]), 2)
    for numbers in ((0, 1), (2, 3), (4, 5)):
        micro_batch = window.take(2)
        assert micro_batch.num_images == 2
        assert_same(micro_batch.batch, columns(kind, *numbers))
    assert window.take(2) is None
    assert window.num_images == window.expected_images == 6


@pytest.mark.parametrize("kind", KINDS)
def test_uncut_they_come_as_they_are(kind):
    batch = columns(kind, 0, 1)
    given = Window(iter([batch]), 1).take().batch
    assert_same(given, batch)
    assert all(a is b for a, b in zip(given[0], batch[0])) or given[0] is batch[0]


def test_a_model_that_appends_to_a_list_changes_nothing():
    window = Window(iter([(dicts(0, 1), dicts(2, 3))]), 1)
    strong, weak = window.take().batch
    strong.extend(weak)
    window.put_back()
    assert window.take().num_images == 2
    assert window.micro_batches[0].batch == (dicts(0, 1), dicts(2, 3))


@pytest.mark.parametrize(
    "batch",
    [
        (dicts(0, 1), dicts(2)),
        ([], []),
        (),
        (torch.ones(()), torch.ones(())),
        (dicts(0, 1), "ab"),
        [torch.ones(3, 4, 4), torch.ones(3, 4, 4)],
        [(torch.ones(3), {}), (torch.ones(3), {})],
    ],
)
def test_other_kinds_count_as_one_and_cannot_be_cut(batch):
    assert count_images(batch) == 1
    assert as_given(batch) is batch
    with pytest.raises(ConfigError, match="need a data loader that gives lists of dataset dicts"):
        Window(iter([batch]), 1).take(1)


class Products(torch.nn.Module):
    """The gradient of its weight is the mean product of image and target."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        xs, targets = batch
        products = [x.sum() * t["image_id"] for x, t in zip(xs, targets)]
        return {"loss": self.weight * torch.stack(products).mean()}


@pytest.mark.parametrize(("micro_batch", "steps"), [(None, 2), (1, 2), (3, 2), (2, 1)])
def test_each_image_counts_once(micro_batch, steps):
    model = Products()
    loader = [columns("lists", *range(4 * i, 4 * i + 4)) for i in range(steps)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = AccumulatingTrainer(model, loader, optimizer, steps, micro_batch_size=micro_batch)
    storage = iterate(trainer)
    num = 4 * steps
    assert model.weight.item() == pytest.approx(-sum(i * i for i in range(num)) / num)
    assert storage.latest()["effective_batch"][0] == num
