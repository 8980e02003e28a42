# Copyright (c) the d2_memfit developers.
"""An evaluation goes on with the same results after a batch did not fit."""

import pickle

import pytest
import torch
from detectron2.evaluation import inference_on_dataset
from injection import Injector, read_record
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.common.errors import OutOfMemoryError
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.evaluating import evaluating, recovering_inference

FAMILIES = ("proposal_network", "mask_rcnn", "keypoint_rcnn", "retinanet")


class Collector:
    def reset(self):
        self.outputs = []

    def process(self, inputs, outputs):
        self.outputs += [{"image_id": i["image_id"], **o} for i, o in zip(inputs, outputs)]

    def evaluate(self):
        return {"outputs": self.outputs}


def evaluate(model, options=None, batch_size=3):
    loader = [images(batch_size, first=10 * i) for i in range(2)]
    with recovering_inference(model, options):
        return inference_on_dataset(model, loader, Collector())["outputs"]


def assert_same_outputs(actual, expected):
    assert [o["image_id"] for o in actual] == [o["image_id"] for o in expected]
    for a, e in zip(actual, expected):
        for kind in e.keys() - {"image_id"}:
            fields = e[kind].get_fields()
            for name, field in fields.items():
                x, y = (getattr(f, "tensor", f) for f in (a[kind].get(name), field))
                torch.testing.assert_close(x, y)


def fail_with(model, num_images):
    """Let the forward of a model fail with so many images or more, before it computes."""
    forward = model.forward

    def failing(batch):
        if len(batch) >= num_images:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(batch)

    model.forward = failing


class Injected:
    """In place of a model's forward: allocations in it go through an injector."""

    def __init__(self, model):
        self.forward, self.injector = model.forward, Injector()

    def __call__(self, batch):
        with self.injector:
            return self.forward(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_the_same_one_image_at_a_time(family, tmp_path):
    model = tiny_model(tiny_cfg(family, fpn=False))
    expected = evaluate(model)
    fail_with(model, 2)
    actual = evaluate(model, RecoveryOptions(output_dir=str(tmp_path)))
    assert_same_outputs(actual, expected)
    assert [event["action"] for event in read_record(tmp_path)] == [
        "results are post-processed on the host",
        "the images are run one at a time",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_failure_anywhere_changes_no_result(family):
    model = tiny_model(tiny_cfg(family, fpn=False))
    model.forward = Injected(model)
    expected = evaluate(model)
    num_allocations = model.forward.injector.num_allocations
    for point in range(1, num_allocations, num_allocations // 5):
        model.forward.injector = Injector([point])
        assert_same_outputs(evaluate(model, RecoveryOptions()), expected)
        assert model.forward.injector.num_allocations > num_allocations


def test_an_image_that_fits_in_no_way_is_named():
    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False))
    fail_with(model, 1)
    with pytest.raises(OutOfMemoryError, match=r"in the evaluation .*image_0.png.*MAX_SIZE_TEST"):
        evaluate(model, RecoveryOptions())


def test_the_model_can_be_pickled_meanwhile_and_is_afterwards_as_it_was():
    """As evaluators that start processes do."""
    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False)).eval()
    before, original, batch = set(vars(model)), type(model), images(2)
    with recovering_inference(model, RecoveryOptions()), torch.no_grad():
        copied = pickle.loads(pickle.dumps(model))
        assert type(model) is type(copied) is original
        assert_same_outputs(*([{"image_id": 0, **o} for o in m(batch)] for m in (copied, model)))
    assert set(vars(model)) == before


def test_training_draws_what_it_would_without_an_evaluation():
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    before = torch.get_rng_state()
    with evaluating(cfg, tiny_model(cfg)):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
