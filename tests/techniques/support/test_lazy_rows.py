# Copyright (c) the d2_memfit developers.
import copy
import pickle

import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Instances

from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.support import lazy_rows
from d2_memfit.techniques.support.lazy_rows import LazyRows, LazyRowsChangeError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(lazy_rows, "_CHUNK_BYTES", 2**10)


def lazy(tensor):
    """The rows of a tensor [images, rows, height, width]."""
    flat = tensor.flatten(0, 1)
    numbers = torch.arange(len(flat)).view(tensor.shape[:2])
    return LazyRows(lambda n: flat[n], numbers, flat[:1].to("meta"), 0, flat.device)


X = torch.randn(2, 7, 30, 40, generator=torch.Generator().manual_seed(0))
SCORES = torch.rand(7, generator=torch.Generator().manual_seed(1))
CHOSEN = torch.tensor([5, 0, 0, 3])

STAY_LAZY = {
    "an image": lambda x: x[1],
    "a part": lambda x: x[:, 2:5],
    "chosen rows": lambda x: x[0][CHOSEN],
    "rows of a mask": lambda x: x[0][SCORES > 0.5],
    "a row": lambda x: x[1, 3],
    "cropped": lambda x: x[..., :20, 5:],
    "with a new dimension in front": lambda x: x[0].expand(1, -1, -1, -1),
    "with a new dimension behind": lambda x: x[0, 1][:, :, None],
    "with a new dimension within": lambda x: x[0][:, None],
    "images and rows together": lambda x: x.flatten(0, 1),
    "pixels in a row": lambda x: x[0].flatten(1),
    "inverted": lambda x: 1 - x[0].sigmoid() ** 2,
    "thresholded": lambda x: x > 0,
    "as numbers": lambda x: (x[0] > 0).float(),
    "weighted": lambda x: SCORES.view(-1, 1, 1) * x[0].sigmoid(),
    "a product of two": lambda x: x[0].sigmoid().flatten(1) * (x[0] > 0).float().flatten(1),
    "with a number of the other image": lambda x: x[0] + x[1][:, :1, :1].mean(),
    "in another format": lambda x: x.to(torch.float64),
}
COMPUTED = {
    "sums": lambda x: x[0].flatten(1).sum(1),
    "projections": lambda x: (x[0] > 0).any(dim=1).flatten(),
    "sum of all": lambda x: x.sum(),
    "a product of matrices": lambda x: torch.einsum("qc,qhw->chw", SCORES[:, None], x[0]),
    "other order": lambda x: x[0].permute(1, 2, 0),
    "pixels of a mask": lambda x: x[0][x[0] > 0],
    "all together": lambda x: torch.cat([x[0], x[1]]),
}


@pytest.mark.parametrize("name", [*STAY_LAZY, *COMPUTED])
@torch.no_grad()
def test_what_is_made_of_it_is_what_is_made_of_the_tensor(name):
    function = {**STAY_LAZY, **COMPUTED}[name]
    expected, found = function(X), function(lazy(X))
    assert isinstance(found, LazyRows) == (name in STAY_LAZY)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    found = found.compute() if isinstance(found, LazyRows) else found
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * (name in COMPUTED))


@torch.no_grad()
def test_rows_come_one_by_one_as_arrays_too():
    masks, expected = lazy(X)[0] > 0, X[0] > 0
    assert len(masks) == 7
    for mask, other in zip(masks, expected):
        assert isinstance(mask, LazyRows)
        assert np.array_equal(np.array(mask, order="F", dtype="uint8"), other)
        assert np.array_equal(mask.numpy(), other)
    assert np.array_equal(np.asarray(masks), expected)
    assert masks.tolist() == expected.tolist()


@torch.no_grad()
def test_it_goes_where_tensors_go():
    masks, expected = lazy(X)[0] > 0, X[0] > 0
    instances = Instances((30, 40), pred_masks=masks, scores=SCORES)
    chosen = instances[instances.scores > 0.5].to("cpu")
    assert isinstance(chosen.pred_masks, LazyRows)
    assert torch.equal(chosen.pred_masks.compute(), expected[SCORES > 0.5])
    boxes = BitMasks(masks).get_bounding_boxes()
    assert torch.equal(boxes.tensor, BitMasks(expected).get_bounding_boxes().tensor)
    assert torch.equal(pickle.loads(pickle.dumps(masks)), expected)
    assert torch.equal(copy.deepcopy(masks).compute(), expected)
    assert "shape=(7, 30, 40)" in repr(masks)


@torch.no_grad()
def test_no_row_is_fine():
    masks = lazy(X)[0][torch.zeros(7, dtype=torch.bool)]
    assert masks.flatten(1).sum(1).shape == (0,)
    assert np.asarray(masks).shape == (0, 30, 40)


@torch.no_grad()
def test_writing_is_an_error():
    masks = lazy(X)[0]
    for write in (masks.sigmoid_, masks[0].zero_, lambda: masks.add_(1)):
        with pytest.raises(LazyRowsChangeError, match=r"writes into masks that are computed when"):
            write()
    masks[0][None].clone()  # a copy can be written to


@torch.no_grad()
def test_memory_is_that_of_a_few_rows(monkeypatch):
    x, row_bytes = torch.randn(50, 1, 1), 300 * 400 * 4
    monkeypatch.setattr(lazy_rows, "_CHUNK_BYTES", row_bytes)
    like = torch.empty(1, 300, 400, device="meta")
    with TensorMeter() as meter:
        made = lambda n: x[n].repeat(1, 300, 400)  # noqa: E731
        masks = LazyRows(made, torch.arange(50), like, row_bytes, x.device)
        sums = (masks.sigmoid().flatten(1) * (masks > 0).float().flatten(1)).sum(1)
        sums += sum(torch.tensor(mask.numpy().sum()) for mask in masks > 0)
    assert sums.shape == (50,)
    assert meter.peak_bytes < 5 * row_bytes
