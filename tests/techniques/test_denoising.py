# Copyright (c) the d2_memfit developers.
import copy
import pickle
from collections import Counter
from functools import wraps
from inspect import signature

import pytest
import torch
from d2_transformers import Trainer
from detectron2.modeling import build_model
from injection import FailingTrainer, iterate, scripted
from tiny import images, parameters, relative_difference, tiny_cfg
from tiny_transformers import RESOLUTION, tiny_transformers_cfg
from torch import nn

from d2_memfit.common.patching import replaced_together
from d2_memfit.errors import ConfigError
from d2_memfit.job import Job
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.probe import run_for_real
from d2_memfit.settings import NormalizerOptions, RecoveryOptions
from d2_memfit.techniques import apply_techniques, get_technique

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

LOG = "d2_memfit.techniques.denoising"
MAKES = "get_contrastive_denoising_training_group"
EACH_KIND = pytest.mark.parametrize("kind", ["rt_detr_v2", "d_fine"])


def made(kind="rt_detr_v2", limit=None, **options):
    """A tiny detector with the same weights each time, and a num_denoising of 10."""
    cfg = tiny_transformers_cfg(kind, **options)
    cfg.MEMFIT.CRITERION.DENOISING_QUERIES = limit
    torch.manual_seed(0)
    model = apply_techniques("model", build_model(cfg), cfg)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def batch(*counts):
    return [images(1, first=i, num_instances=count)[0] for i, count in enumerate(counts)]


def step(model, counts, seed=1):
    """Losses, gradients, and a random number that is drawn afterwards."""
    model.zero_grad()
    torch.manual_seed(seed)
    losses = model(batch(*counts))
    sum(losses.values()).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {k: v.detach() for k, v in losses.items()}, gradients, torch.rand(1)


def is_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@EACH_KIND
@pytest.mark.parametrize("counts", [(6, 3), (12,), (12, 0), (0, 0)])
def test_up_to_the_limit_all_is_equal_to_the_last_bit(kind, counts, log):
    plain, bounded = made(kind), made(kind, limit=12)
    log.clear()
    assert all(map(is_equal, step(plain, counts), step(bounded, counts)))
    assert log.text == ""


def record_queries(monkeypatch, isolated=False):
    """Record how many denoising queries there are.

    Args:
        isolated: whether each query sees only itself and has no noise.
    """
    from transformers.models.d_fine import modeling_d_fine
    from transformers.models.rt_detr_v2 import modeling_rt_detr_v2

    found = []
    for file in (modeling_d_fine, modeling_rt_detr_v2):
        original = getattr(file, MAKES)

        @wraps(original)
        def make(*args, original=original, **kwargs):
            arguments = signature(original).bind(*args, **kwargs).arguments
            if isolated:
                arguments.update(label_noise_ratio=0, box_noise_scale=0)
            classes, boxes, mask, meta = original(**arguments)
            num = classes.shape[1]
            found.append(num)
            if isolated:
                mask[:num] = -torch.inf
                mask.fill_diagonal_(0)
            return classes, boxes, mask, meta

        monkeypatch.setattr(file, MAKES, make)
    return found


@pytest.mark.parametrize(
    ("counts", "limit", "expected"),
    [
        ((30,), None, 60),
        ((30,), 12, 24),
        ((30, 0), 12, 24),
        ((30, 2, 11), 12, 24),
        ((13, 40), 12, 24),
        ((3,), 12, 18),  # three groups, as the project makes them
        ((3,), 4, 6),  # one group
    ],
)
def test_the_queries_are_as_many_as_the_limit_allows(counts, limit, expected, monkeypatch):
    model = made(limit=limit)
    found = record_queries(monkeypatch)
    losses, gradients, _ = step(model, counts)
    assert found == [expected]
    assert all(torch.isfinite(x).all() for x in (*losses.values(), *gradients.values()))


@EACH_KIND
def test_matched_queries_have_all_objects(kind):
    plain, bounded = made(kind), made(kind, limit=12)
    expected, actual = step(plain, (30, 4))[0], step(bounded, (30, 4))[0]
    matched = [name for name in expected if "_dn_" not in name]
    assert all(torch.allclose(actual[name], expected[name], rtol=1e-5) for name in matched)
    assert actual.keys() == expected.keys()


@EACH_KIND
@pytest.mark.parametrize("counts", [(12,), (12, 12), (12, 6, 1, 0)])
def test_the_mean_over_choices_is_that_of_all_objects(kind, counts, monkeypatch):
    """Without noise and attention among queries, over choices that together are all objects."""
    plain, bounded = made(kind), made(kind, limit=4)
    record_queries(monkeypatch, isolated=True)
    names = ["loss_bbox", "loss_giou", "loss_fgl"]
    if len(set(counts)) == 1:  # classification losses include padding of the other images
        names.append("loss_vfl")

    def of_denoising(model):
        model.zero_grad()
        losses = model(batch(*counts))
        chosen = {k: v for k, v in losses.items() if "_dn_" in k and k.startswith(tuple(names))}
        sum(chosen.values()).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {k: v.detach() for k, v in chosen.items()}, gradients

    expected = of_denoising(plain)
    draws = []
    for draw in range(3):
        monkeypatch.setattr(torch, "randperm", lambda n, i=draw: (torch.arange(n) + 4 * i) % n)
        draws.append(of_denoising(bounded))
    for wanted, *found in zip(expected, *draws):
        assert relative_difference(found[0], wanted) > 0.01
        mean = {name: sum(x[name] for x in found) / len(found) for name in wanted}
        assert relative_difference(mean, wanted) < 1e-5


def test_each_object_has_the_same_chance(monkeypatch):
    from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as file

    seen = Counter()

    def make(targets, num_classes, num_queries, class_embed, num_denoising_queries):
        assert [len(t["boxes"]) for t in targets] == [len(t["class_labels"]) for t in targets]
        seen.update((i, box[0].item()) for i, t in enumerate(targets) for box in t["boxes"])
        return None, None, None, {}

    monkeypatch.setattr(file, MAKES, make)
    model = made(limit=3)
    targets = [
        {"class_labels": torch.zeros(n), "boxes": torch.arange(n)[:, None].expand(n, 4)}
        for n in (9, 2, 5)
    ]
    torch.manual_seed(0)
    with replaced_together(model.replaced()):
        for _ in range(1000):
            getattr(file, MAKES)(targets, 1, 12, None, 10)
    for image, count, chance in ((0, 9, 3 / 9), (1, 2, 1), (2, 5, 3 / 5)):
        error = 4 * (1000 * chance * (1 - chance)) ** 0.5
        for i in range(count):
            assert seen[image, float(i)] == pytest.approx(1000 * chance, abs=error)


@EACH_KIND
def test_a_restored_random_state_gives_the_same_choice(kind):
    model = made(kind, limit=4)
    first, again, other = (step(model, (20, 9), seed) for seed in (1, 1, 2))
    assert all(map(is_equal, first, again))
    assert not is_equal(first[0], other[0])


def test_a_repeated_window_has_the_same_choice():
    """An out-of-memory error with both images at once, against images that run one by one."""
    ends = []
    for largest in (2, 1):
        model = made(limit=4)
        trainer = FailingTrainer(
            model,
            [batch(20, 9)],
            torch.optim.SGD(model.parameters(), lr=0.01),
            recovery=RecoveryOptions(),
            normalizers=NormalizerOptions("off"),
            fails=lambda names: len(names) == 2,
        )
        trainer.phase = "backward"
        if largest == 1:
            trainer.cutter.take = scripted([1, 1])
        torch.manual_seed(1)
        iterate(trainer)
        assert len(trainer.forwards) == 1 + largest
        ends.append({**parameters(model), "random": torch.rand(1)})
    assert is_equal(*ends)


def test_an_estimate_counts_what_is_saved():
    peaks = {}
    for limit in (None, 10):
        cfg = tiny_transformers_cfg("rt_detr_v2")
        cfg.SOLVER.IMS_PER_BATCH = 1
        cfg.MEMFIT.CRITERION.DENOISING_QUERIES = limit
        dry_job = DryJob(
            Job.from_trainer(Trainer, cfg, 1, batch=images(1, size=RESOLUTION, num_instances=500)),
            DeviceModel.load("cpu"),
            evaluates=False,
        )
        with TensorMeter() as meter:
            next(run_for_real(dry_job, "cpu"))
        peaks[limit] = sum(dry_job.training.peak().values())
        assert meter.peak_bytes == pytest.approx(peaks[limit], rel=0.02)
    assert peaks[10] < peaks[None] / 3


def test_the_peak_is_bounded_as_objects_grow():
    peaks = {}
    for limit in (None, 10):
        model = made(limit=limit)
        for count in (50, 1000) if limit else (50, 400):
            data = batch(count)
            with TensorMeter() as meter:
                sum(model(data).values()).backward()
            peaks[limit, count] = meter.peak_bytes
    assert peaks[None, 400] > 5 * peaks[None, 50]
    assert peaks[10, 1000] < 1.2 * peaks[10, 50]


def test_the_criterion_can_run_in_chunks_too():
    losses, peaks = [], []
    for chunk_size in (None, 8):
        cfg = tiny_transformers_cfg("rt_detr_v2")
        cfg.TRANSFORMERS.NUM_QUERIES = 200
        cfg.MEMFIT.CRITERION.DENOISING_QUERIES = 10
        cfg.MEMFIT.CRITERION.CHUNK_SIZE = chunk_size
        torch.manual_seed(0)
        model = apply_techniques("model", build_model(cfg), cfg)
        with TensorMeter() as meter:
            losses.append(step(model, (300,))[0])
        peaks.append(meter.peak_bytes)
    assert peaks[1] < 0.8 * peaks[0]
    assert relative_difference(losses[1], losses[0]) < 1e-5


def test_objects_without_queries_are_said_once(log):
    model = made(limit=4)
    for counts in [(3,), (20, 9), (20, 9)]:
        step(model, counts)
    start, first = (r.getMessage() for r in log.records if r.name == LOG)
    assert start.startswith("MEMFIT.CRITERION.DENOISING_QUERIES 4: if an image has more objects")
    assert "4 of the 20 objects of an image have denoising queries" in first


def test_copies_are_bounded_too(monkeypatch):
    model = made(limit=4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = record_queries(monkeypatch)
        step(other, (20,))
        assert found == [8]


class Dino(nn.Module):
    """The denoising part of detrex's DINO, whose queries are learned for each of 8 objects."""

    def __init__(self):
        super().__init__()
        self.criterion = DinoCriterion()
        self.scores = nn.Parameter(torch.arange(8.0))

    def forward(self, targets):
        queries, meta = self.prepare_for_cdn(targets, dn_number=1)
        meta["output_known_lbs_bboxes"] = {"pred_logits": queries}
        return self.criterion.compute_dn_loss(
            meta, targets, 0, sum(len(t["labels"]) for t in targets)
        )

    def prepare_for_cdn(self, targets, dn_number):
        most = max(len(t["labels"]) for t in targets)
        rows = [self.scores[t["labels"]] for t in targets]
        queries = torch.stack([nn.functional.pad(row, (0, most - len(row))) for row in rows])
        return queries, {"dn_num": dn_number}


class DinoCriterion(nn.Module):
    def compute_dn_loss(self, dn_metas, targets, aux_num, num_boxes):
        indices = [(torch.arange(len(t["labels"])),) * 2 for t in targets]
        outputs = dn_metas["output_known_lbs_bboxes"]
        return self.get_loss("boxes", outputs, targets, indices, num_boxes * dn_metas["dn_num"])

    def get_loss(self, loss, outputs, targets, indices, num_boxes):
        losses = [
            ((row[queries] - target["labels"][objects]) ** 2 + target["labels"][objects]).sum()
            for row, target, (queries, objects) in zip(outputs["pred_logits"], targets, indices)
        ]
        return {"loss_bbox_dn": sum(losses) / num_boxes}


def test_queries_of_detrex_are_bounded_too(monkeypatch):
    targets = [{"labels": torch.arange(n)} for n in (8, 3, 0)]
    cfg = tiny_cfg()
    cfg.MEMFIT.CRITERION.DENOISING_QUERIES = 4
    model = apply_techniques("model", Dino(), cfg)
    expected = Dino()(targets)["loss_bbox_dn"].item()
    found = []
    for draw in range(2):
        monkeypatch.setattr(torch, "randperm", lambda n, i=draw: (torch.arange(n) + 4 * i) % n)
        found.append(model(targets)["loss_bbox_dn"].item())
    assert found[0] != expected
    assert sum(found) / 2 == pytest.approx(expected)
    assert model(targets[1:])["loss_bbox_dn"] == Dino()(targets[1:])["loss_bbox_dn"]


class MaskDinoDecoder(nn.Linear):
    def prepare_for_dn(self, targets):
        pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.Linear(1, 1), "the model has no denoising queries"),
        (lambda: build_model(tiny_transformers_cfg("rf_detr")), "has no denoising queries"),
        (lambda: made("d_fine", num_denoising=0), "num_denoising of the model is 0"),
        (lambda: MaskDinoDecoder(1, 1), "MaskDinoDecoder.prepare_for_dn makes denoising queries"),
        (lambda: made().model.model, "its criterion has no get_cdn_matched_indices"),
    ],
)
def test_other_models_are_refused_in_one_line(make, problem):
    cfg = tiny_cfg()
    cfg.MEMFIT.CRITERION.DENOISING_QUERIES = 4
    with pytest.raises(ConfigError, match=problem) as error:
        apply_techniques("model", make(), cfg)
    assert str(error.value).startswith("MEMFIT.CRITERION.DENOISING_QUERIES: ")
    assert "\n" not in str(error.value)


def test_plans_use_it_for_models_with_denoising_only():
    settings = get_technique("DenoisingQueries").enabling_settings
    assert settings(tiny_transformers_cfg("d_fine")) == {"MEMFIT.CRITERION.DENOISING_QUERIES": 100}
    assert settings(tiny_transformers_cfg("rf_detr")) == settings(tiny_cfg()) == {}
