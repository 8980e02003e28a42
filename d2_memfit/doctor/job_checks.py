# Copyright (c) the d2_memfit developers.
"""The checks of a job: each returns a line about what works, or raises an error."""

import copy
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer
from detectron2.utils.events import EventStorage
from torch import nn

from ..collectives import Collective, noticed_collectives, pretended_ranks
from ..config import with_settings
from ..engine import MemfitMixin, RecoveryOptions, recovering_inference
from ..engine.forward_counters import numbers_of
from ..engine.snapshot import Snapshot
from ..errors import MemfitError
from ..job import Job
from ..measure.injection import Injector, seed_all
from ..memory import TensorMeter
from ..planner import steps
from ..planner.device_model import DeviceModel
from ..planner.dry_job import DryJob
from ..planner.explain import one_line_errors
from ..techniques import TECHNIQUES, get_technique
from .patient import Patient

__all__ = [
    "Unwell",
    "accumulates",
    "counts",
    "is_estimated",
    "is_silent",
    "puts_state_back",
    "recovers",
    "recovers_in_evaluation",
    "same_as_detectron2",
    "trains",
    "usable_techniques",
]

_EXACT = 1e-4  # relative distance of gradients in float32
_CLOSE = 0.1  # such as Mask R-CNN's distance: its mask loss counts foreground
_ESTIMATE = 0.02  # relative error of an estimate
_NEGLIGIBLE_BYTES = 2**20
_WARM_UP = 4  # iterations
_FEW = 5  # names in a line


class Unwell(Exception):
    """Something does not work; the message says what."""


def same_as_detectron2(patient: Patient) -> str:
    def plain() -> list[torch.Tensor]:
        model = patient.model()
        trainer = SimpleTrainer(model, [patient.batch()], torch.optim.SGD(model.parameters(), 0.0))
        seed_all()
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
        raise Unwell("loss or gradients are not those of Detectron2's SimpleTrainer")
    return f"loss {loss:.4g} and gradients are Detectron2's, to the last bit"


def accumulates(patient: Patient) -> str:
    full, _, _ = patient.step()
    cut, _, _ = patient.step(micro_batch_size=1)
    other, _, _ = patient.step(seed=1)
    distance, by_chance = _distance(cut, full), _distance(other, full)
    if distance <= _EXACT:
        return f"gradients of two micro-batches are those of the full batch, to {distance:.0e}"
    if distance <= max(2 * by_chance, _CLOSE if by_chance else 0):
        return (
            f"gradients of two micro-batches are {distance:.2g} from the full batch's; another "
            f"random seed makes {by_chance:.2g}"
        )
    raise Unwell(
        f"gradients of two micro-batches are {distance:.2g} from the full batch's, because a loss "
        "is divided by a count of its own batch, or draws random numbers. See ACCUMULATION.md"
    )


def _distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    if len(one) != len(other):
        return float("inf")
    difference = sum(float((a - b).double().pow(2).sum()) for a, b in zip(one, other))
    return (difference / max(sum(float(b.double().pow(2).sum()) for b in other), 1e-30)) ** 0.5


def recovers(patient: Patient, where: float) -> str:
    """Check recovery from an error after the share ``where`` of an iteration's allocations."""
    _, _, counting = patient.step(fail_at=(10**9,), with_optimizer=True)
    fail_at = int(counting.injector.num_allocations * where)
    undisturbed, _, _ = patient.step(micro_batch_size=1, with_optimizer=True)
    recovered, _, trainer = patient.step(fail_at=(fail_at,), with_optimizer=True)
    if trainer.window_sizes != (1, 1):
        raise Unwell(f"the two images were run as {trainer.window_sizes}, and not one by one")
    if not all(map(torch.equal, recovered, undisturbed)):
        raise Unwell(
            f"weights are {_distance(recovered, undisturbed):.1e} from those of an iteration "
            "without the error: something that a forward changes is not put back"
        )
    return "the images are run again one by one, and weights are as without the error, bit by bit"


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
    before = _other_state(model)
    snapshot = Snapshot(model)
    counters = numbers_of(model)

    def forward() -> None:
        losses = model(patient.batch())
        loss = losses if isinstance(losses, torch.Tensor) else sum(losses.values())
        loss.backward()

    patient.call(forward)
    counting = [k for k, v in numbers_of(model).items() if k in counters and v == counters[k] + 1]
    snapshot.restore()
    after = _other_state(model)
    changed = [name for name, value in after.items() if not _same(before.get(name), value)]
    if changed:
        raise Unwell(
            f"a forward changes {_some(changed)}, which a retry does not put back: keep it in a "
            "number or a list, or write save_for_retry() and restore_for_retry(state)"
        )
    if counting:
        return f"all is put back. {_some(counting)} counts forwards, not iterations"
    return "all is put back"


def _other_state(model: nn.Module) -> dict[str, Any]:
    """Attributes of modules that are neither parameters nor modules, and buffers.

    Tensors and arrays are copied; others are converted to text.
    """
    result = {}
    for path, part in model.named_modules():
        values = [(k, v) for k, v in vars(part).items() if k not in _INTERNAL]
        for name, value in [*values, *part.named_buffers(recurse=False)]:
            is_numbers = isinstance(value, (torch.Tensor, np.ndarray))
            text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
            copied = torch.as_tensor(value).detach().clone() if is_numbers else text
            result[f"{path or type(model).__name__}.{name}"] = copied
    return result


_INTERNAL = set(vars(nn.Module()))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def counts(patient: Patient) -> str:
    _, _, trainer = patient.step(micro_batch_size=1, iterations=2)
    places = trainer.normalizers.rules.described()
    return f"with accumulation, these are the window's: {_some(places)}" if places else "none found"


def is_silent(patient: Patient) -> str:
    model = patient.model()
    found: list[str] = []

    def handle(call: Collective) -> bool:
        if not call.is_count:
            found.append(str(call))
        elif call.is_sum:
            call.tensors[0].mul_(call.num_ranks)
        return True

    def forward() -> None:
        with noticed_collectives(handle), pretended_ranks(2):
            try:
                model(patient.batch())
            except Exception:  # of what has no answer from another rank
                if not found:
                    raise

    patient.call(forward)
    if not found:
        return "none but of counts"
    raise Unwell(
        f"{_some(list(dict.fromkeys(found)))}: on several ranks MEMFIT.OOM.POLICY split cannot run "
        "one rank's images again. Train with policy raise"
    )


def is_estimated(patient: Patient) -> str:
    at_once = {"MEMFIT.MICRO_BATCH": None, "SOLVER.ACCUMULATION_STEPS": 1}
    job = patient.job.with_settings(at_once).with_batch(patient.images)
    dry_job = DryJob(job, DeviceModel.load("cpu"), evaluates=False)

    def measure() -> int:
        batch = job.training_batch(job.geometry.micro_batch_sizes()[0])
        with TensorMeter() as meter:
            model, optimizer = steps.build_with_values(job, "cpu")
            for group in optimizer.param_groups:
                group["lr"] = 0.0  # random weights would diverge
            for _ in range(2):
                optimizer.zero_grad(set_to_none=True)
                for _ in steps.iterate(model, optimizer, job.precision("cpu"), [batch]):
                    pass
        return meter.peak_bytes

    measured = patient.call(measure)
    estimated = sum(dry_job.training.peak().values())
    error = estimated / measured - 1
    text = f"{estimated / 2**20:.1f} MB, and {measured / 2**20:.1f} MB are measured ({error:+.2%})"
    if abs(error) > _ESTIMATE and abs(estimated - measured) > _NEGLIGIBLE_BYTES:
        raise Unwell(f"{text}. A plan needs a larger MEMFIT.PLAN.MARGIN")
    return text


def trains(patient: Patient, trainer: Any) -> str:
    """Check two iterations of two images with MemfitMixin, one image at a time."""
    images = patient.batch()
    bases = (trainer,) if issubclass(trainer, MemfitMixin) else (MemfitMixin, trainer)

    def build_train_loader(cls: Any, cfg: CfgNode) -> Any:
        return [images] * 4

    members = {"build_train_loader": classmethod(build_train_loader)}
    kind = type(trainer.__name__, bases, members)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **{"OUTPUT_DIR": folder, "MODEL.DEVICE": "cpu", "MODEL.WEIGHTS": ""},
            **{"SOLVER.MAX_ITER": 2, "SOLVER.ACCUMULATION_STEPS": 2, "TEST.EVAL_PERIOD": 0},
            **{"MEMFIT.MICRO_BATCH": 1, "MEMFIT.OOM.POLICY": "split", "MEMFIT.BUDGET_GB": None},
            **{"MEMFIT.PRESET": "", "DATASETS.TEST": (), "SOLVER.AMP.ENABLED": False},
            **{"MEMFIT.PLAN.ENABLED": False, "SOLVER.REFERENCE_WORLD_SIZE": 0},
            **{"MEMFIT.OPTIMIZER.ZERO": False, "MEMFIT.HOST.BUDGET_GB": None},
        }
        patient.call(lambda: kind(with_settings(patient.job.cfg, settings)).train())
    return f"class Trainer(MemfitMixin, {trainer.__name__}) trains"


def usable_techniques(patient: Patient) -> str:
    apply: list[str] = []
    left_out: list[str] = []
    plain = _kinds(patient.job)
    for name, technique in sorted(TECHNIQUES):
        if technique.tier == "recipe" or not technique.planned:
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
    """Number of base classes of each module, which techniques extend; and optimizer class."""
    model, optimizer = steps.build(job)
    return [len(type(m).__mro__) for m in model.modules()] + [type(optimizer)]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more
