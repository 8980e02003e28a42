# Copyright (c) the d2_memfit developers.
"""Checks of a job. Each returns a line about what works, or raises an error."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from ..common.snapshot import Snapshot, changed_by_forward, state_of
from ..compat.pytorch import default_group_replaced
from ..config.settings import RecoveryOptions
from ..engine.collectives import Collective, noticed_collectives
from ..engine.evaluating import recovering_inference
from ..errors import MemfitError
from ..job import Job
from ..planner import steps
from ..planner.errors import one_line_errors
from ..techniques import TECHNIQUES, get_technique
from .estimate_check import estimate_against_real_step
from .injection import Injector, relative_difference
from .patient import Patient, Unwell

__all__ = [
    "is_estimated",
    "is_silent",
    "puts_state_back",
    "recovers",
    "recovers_in_evaluation",
    "same_as_detectron2",
    "usable_techniques",
]

_TOO_LOW = 0.02  # relative error of an estimate
_WARM_UP = 4  # iterations
_FEW = 5  # names in a line


def same_as_detectron2(patient: Patient) -> str:
    def plain() -> list[torch.Tensor]:
        model = patient.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        trainer = SimpleTrainer(_WithLosses(model, patient), [patient.batch()], optimizer)
        seed_all_rng(0)
        with EventStorage():
            trainer.iter = 0
            trainer.run_step()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for _ in range(_WARM_UP):  # functions of torch.jit differ in the first calls
        expected = patient.call(plain)
        gradients, loss, _ = patient.step()
        if len(gradients) == len(expected) and all(map(torch.equal, gradients, expected)):
            break
    else:
        raise Unwell("loss or gradients differ from those of Detectron2's SimpleTrainer")
    return f"loss {loss:.4g} and gradients equal Detectron2's, bit by bit"


class _WithLosses(nn.Module):
    """A model whose forward returns the job's losses."""

    def __init__(self, model: nn.Module, patient: Patient) -> None:
        super().__init__()
        self.model, self.losses = model, patient.losses

    def forward(self, batch: Any) -> Any:
        return self.losses(self.model, batch)


def recovers(patient: Patient, where: float) -> str:
    """Check recovery from an error after the share ``where`` of an iteration's allocations."""
    _, _, counting = patient.step(fail_at=(10**9,), with_optimizer=True)
    fail_at = int(counting.injector.num_allocations * where)
    undisturbed, _, _ = patient.step(micro_batch_size=1, with_optimizer=True)
    recovered, _, trainer = patient.step(fail_at=(fail_at,), with_optimizer=True)
    if trainer.window_sizes != (1, 1):
        raise Unwell(f"the two images were run as {trainer.window_sizes} instead of one by one")
    if not all(map(torch.equal, recovered, undisturbed)):
        difference = relative_difference(dict(enumerate(recovered)), dict(enumerate(undisturbed)))
        raise Unwell(
            f"weights differ by {difference:.1e} from those of an iteration without the error: "
            "something that a forward changes is not put back"
        )
    return "the images are run again one by one; weights equal those without the error, bit by bit"


def recovers_in_evaluation(patient: Patient) -> str:
    if not patient.job.evaluates:
        return "nothing is evaluated"
    model = patient.model().eval()
    batch = patient.batch()
    images = [{k: v for k, v in d.items() if k != "instances"} for d in batch]

    def evaluate(fail_at: tuple[int, ...]) -> int:
        injector = Injector(fail_at)
        with torch.no_grad(), recovering_inference(model, RecoveryOptions()), injector:
            model(copy.deepcopy(images))
        return injector.num_allocations

    num = patient.call(evaluate, ())
    patient.call(evaluate, (num // 2,))
    return "the images are run again"


def puts_state_back(patient: Patient) -> str:
    model = patient.model()
    before, at_start = state_of(model), Snapshot(model)

    def forward() -> None:
        loss: Any = sum(patient.losses(model, patient.batch()).values())
        loss.backward()

    patient.call(forward)
    _, counting = changed_by_forward(before, state_of(model))
    at_start.restore()
    changed, _ = changed_by_forward(before, state_of(model))
    if changed:
        raise Unwell(
            f"a forward changes {_few(changed)}, which a retry does not put back: keep it in a "
            "number or a list, or write save_for_retry() and restore_for_retry(state)"
        )
    if counting:
        return f"all is put back. {_few(counting)} counts forwards, not iterations"
    return "all is put back"


def is_silent(patient: Patient) -> str:
    model = patient.model()
    found: list[str] = []

    def handle(call: Collective) -> bool:
        if not call.is_count:
            found.append(str(call))
        return call.run_alone()

    def forward() -> None:
        with noticed_collectives(handle), default_group_replaced(2):
            try:
                patient.losses(model, patient.batch())
            except Exception:  # there is no other rank to answer
                if not found:
                    raise

    patient.call(forward)
    if not found:
        return "only for counts"
    raise Unwell(
        f"{_few(list(dict.fromkeys(found)))}: on several ranks MEMFIT.OOM.POLICY split cannot run "
        "one rank's images again. Train with policy raise"
    )


def is_estimated(job: Job) -> str:
    """Compare the estimate with a step on real images."""
    images = min(job.cfg.SOLVER.IMS_PER_BATCH, 2 * job.ranks)
    step = estimate_against_real_step(job.with_settings({"SOLVER.IMS_PER_BATCH": images}))
    text = str(step)
    if step.at_least:
        text += f". More may be needed, because {'; '.join(step.at_least)}"
    if step.error < -_TOO_LOW and not step.at_least:
        raise Unwell(f"{text}. Plan for a budget that is smaller by the difference")
    return text


def usable_techniques(patient: Patient) -> str:
    apply: list[str] = []
    left_out: list[str] = []
    plain = _kinds(patient.job)
    for name, technique in sorted(TECHNIQUES):
        if technique.tier == "recipe" or not technique.in_plans:
            continue
        try:
            settings = get_technique(name).enabling_settings(patient.job.cfg)
            with one_line_errors():
                changed = _kinds(patient.job.with_settings(settings)) != plain
            if changed or technique.part not in ("model", "optimizer"):
                apply.append(name)
        except MemfitError as e:
            left_out.append(f"{name} ({e})")
    return f"{', '.join(apply)}" + (f"; not {'; '.join(left_out)}" if left_out else "")


def _kinds(job: Job) -> list[Any]:
    """Numbers of base classes of the modules, which techniques extend, and the optimizer class."""
    model, optimizer = steps.build(job)
    return [len(type(m).__mro__) for m in model.modules()] + [type(optimizer)]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more
