# Copyright (c) the d2_memfit developers.
"""What a project's trainer is told, and that the remedy in each message works."""

import pytest
import torch
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer
from trainer_shapes import (
    FewShot,
    MaskDINO,
    OwnInner,
    Parts,
    UnbiasedTeacher,
    cfg_of,
    class_of,
)

from d2_memfit import AccumulatingTrainer, MemfitMixin
from d2_memfit.common.errors import ConfigError

ACCUMULATION = {"SOLVER.ACCUMULATION_STEPS": 2, "MEMFIT.OOM.POLICY": "split"}


@pytest.mark.parametrize("kind", [SimpleTrainer, AMPTrainer, AccumulatingTrainer])
def test_whoever_makes_it_the_inner_trainer_has_the_options_of_the_config(kind, tmp_path, log):
    def inner_of(**keys):
        trainer = class_of("past DefaultTrainer")(cfg_of(tmp_path, **keys))
        trainer._trainer = kind(trainer.model, trainer.data_loader, trainer.optimizer)
        return trainer._trainer

    inner = inner_of(**ACCUMULATION, **{"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"})
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
    text = r"ActivationCheckpointing would do nothing: .* self\.build_model\(cfg\), "
    with pytest.raises(ConfigError, match=text):
        Trainer(cfg_of(tmp_path, **keys))
    remedied = class_of("past DefaultTrainer")(cfg_of(tmp_path, **keys))
    assert "forward" in vars(remedied.model.net)


def test_a_run_step_that_reads_no_key_is_an_error_where_one_is_set(tmp_path):
    class Trainer(MemfitMixin, UnbiasedTeacher):
        pass

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
        Trainer(cfg_of(tmp_path, **ACCUMULATION)).train()
    Trainer(cfg_of(tmp_path)).train()
    trainer = Remedied(cfg_of(tmp_path, **ACCUMULATION))
    trainer.train()
    assert trainer.storage.latest()["effective_batch"][0] == 8
