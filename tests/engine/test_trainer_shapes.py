# Copyright (c) the d2_memfit developers.
"""Trainers of every shape on two ranks that are not alike: none hangs, and all agree.

A project's trainer that cannot accumulate is told so, and the remedy in each message works.
"""

import functools

import pytest
import torch
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer
from trainer_shapes import (
    PROJECTS,
    FewShot,
    MaskDINO,
    OwnInner,
    Parts,
    UnbiasedTeacher,
    cfg_of,
    class_of,
    train,
)

from d2_memfit import AccumulatingTrainer, MemfitMixin
from d2_memfit.common.errors import ConfigError

SPLIT = {"SOLVER.ACCUMULATION_STEPS": 2, "MEMFIT.OOM.POLICY": "split"}
THREE = ["past DefaultTrainer", "another checkpointer on rank 0", "SimpleTrainer"]


@pytest.fixture(scope="module")
def straight(two_ranks, tmp_path_factory):
    """The outcomes of a run that nothing disturbs or ends, by the shape of its trainer."""

    @functools.cache
    def run(shape):
        keys = {} if shape == "own run_step" else SPLIT
        return two_ranks.run(train, shape, tmp_path_factory.mktemp("straight"), keys)

    return run


def same_on_all_ranks(outcomes):
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0], rtol=0, atol=0)
    return outcomes[0]


@pytest.mark.parametrize("shape", PROJECTS)
def test_with_default_keys_it_trains_as_without_d2_memfit(shape, two_ranks, tmp_path):
    actual = same_on_all_ranks(two_ranks.run(train, shape, tmp_path / "ours", {}))
    expected = two_ranks.run(train, f"plain {shape}", tmp_path / "plain", {})
    torch.testing.assert_close(actual, expected[0], rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "phase"), zip(THREE, ("forward", "criterion", "backward")))
def test_errors_on_one_rank_change_nothing(shape, phase, two_ranks, straight, tmp_path):
    failed = same_on_all_ranks(two_ranks.run(train, shape, tmp_path, SPLIT, phase))
    torch.testing.assert_close(failed, same_on_all_ranks(straight(shape)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [*THREE, "own run_step"])
def test_a_resumed_run_ends_as_one_that_was_not(shape, two_ranks, straight, tmp_path):
    keys = {} if shape == "own run_step" else SPLIT
    two_ranks.run(train, shape, tmp_path, keys, "", 0, 2)
    resumed = two_ranks.run(train, shape, tmp_path, keys, "", 2, 4)
    torch.testing.assert_close(resumed, straight(shape), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [SimpleTrainer, AMPTrainer, AccumulatingTrainer])
def test_whoever_makes_it_the_inner_trainer_has_the_options_of_the_config(kind, tmp_path, log):
    def inner_of(**keys):
        trainer = class_of("past DefaultTrainer")(cfg_of(tmp_path, **keys))
        trainer._trainer = kind(trainer.model, trainer.data_loader, trainer.optimizer)
        return trainer._trainer

    inner = inner_of(**SPLIT, **{"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"})
    assert type(inner) is AccumulatingTrainer
    assert (inner.accumulation_steps, inner.recovery is None) == (2, False)
    assert inner.precision.dtype == torch.bfloat16
    said = "AMPTrainer is made, but SOLVER.AMP.ENABLED False"
    assert said not in log.text
    inner_of()
    assert (said in log.text) is (kind is AMPTrainer)


def test_trainers_that_cannot_accumulate_are_an_error(tmp_path):
    trainer = class_of("past DefaultTrainer")(cfg_of(tmp_path))
    remedy = r"self\._trainer = SimpleTrainer\(.*self\._trainer\.loss_fn = FUNCTION"
    with pytest.raises(TypeError, match=f"OwnInner runs the steps, .*{remedy}"):
        trainer._trainer = OwnInner(trainer.model, trainer.data_loader, trainer.optimizer)
    with pytest.raises(TypeError, match="Trainer is a SimpleTrainer: add AccumulatingTrainer as"):
        type("Trainer", (MemfitMixin, FewShot), {})
    with pytest.raises(TypeError, match="MemfitMixin must be the first base class of Trainer"):
        type("Trainer", (DefaultTrainer, MemfitMixin), {})
    with pytest.raises(TypeError, match="first argument of Trainer must be the config"):
        class_of("DefaultTrainer")(None)


def test_a_technique_that_would_not_be_applied_is_an_error(tmp_path):
    class Trainer(MemfitMixin, MaskDINO):
        def __init__(self, cfg):
            self.build_model = Parts.build_model  # which d2_memfit does not see
            super().__init__(cfg)

    keys = {"MEMFIT.CHECKPOINT.MODULES": ["net"]}
    text = r"ActivationCheckpointing .*would do nothing: .* self\.build_model\(cfg\), "
    with pytest.raises(ConfigError, match=text):
        Trainer(cfg_of(tmp_path, **keys))
    remedied = class_of("past DefaultTrainer")(cfg_of(tmp_path, **keys))
    assert "forward" in vars(remedied.model.net)


def test_a_run_step_that_reads_no_key_is_an_error_where_one_is_set(tmp_path):
    class Remedied(MemfitMixin, UnbiasedTeacher):
        def __init__(self, cfg):
            super().__init__(cfg)
            self._trainer.loss_fn = self.losses

        def losses(self, model, batch):
            return model(batch)

        def run_step(self):
            self._trainer.run_step()

    text = r"ACCUMULATION_STEPS 2, .*OOM\.POLICY split: Trainer steps without self\._trainer"
    with pytest.raises(ConfigError, match=text):
        class_of("own run_step")(cfg_of(tmp_path, **SPLIT)).train()
    class_of("own run_step")(cfg_of(tmp_path)).train()
    trainer = Remedied(cfg_of(tmp_path, **SPLIT))
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8
