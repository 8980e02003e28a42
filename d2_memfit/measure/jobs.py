"""What is measured on a device: each function gives its records one after another."""

import platform
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer
from detectron2.utils.events import EventStorage

from .. import __version__, compat
from ..config import load_cfg, with_settings
from ..engine import AccumulatingTrainer, RecoveryOptions
from ..errors import MemfitError
from ..memory import cuda_context_bytes, process_memory, release_memory
from ..planner import DryJob, WorstCase, worst_case
from ..planner.batches import worst_proposals
from ..planner.calibration import calibrate
from ..planner.device_model import DeviceModel, DeviceUse
from ..planner.job import build_with_values
from ..planner.probe import run_for_real
from ..planner.timeline import Timeline
from ..presets import with_budget
from ..techniques import get_technique
from .checks import CHECKS, GPU_CHECKS
from .injection import iterate, seed_all
from .peaks import limited, median_seconds, peaks_of
from .tiny import images, parameters, relative_difference, tiny_cfg

__all__ = ["JOBS", "Scale"]

Record = dict[str, Any]

_GB = 2**30
_MB = 2**20

_MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
_ZOO = (
    _MASK,
    "COCO-Detection/faster_rcnn_R_50_FPN_3x",
    "COCO-Detection/retinanet_R_50_FPN_3x",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_3x",
    "COCO-Detection/faster_rcnn_R_50_C4_3x",
    "COCO-InstanceSegmentation/mask_rcnn_R_50_DC5_3x",
    "COCO-Detection/rpn_R_50_FPN_1x",
    "COCO-InstanceSegmentation/mask_rcnn_R_101_FPN_3x",
    "COCO-Detection/retinanet_R_101_FPN_3x",
    "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x",
    "Misc/cascade_mask_rcnn_R_50_FPN_3x",
)
_PRESETS = (
    f"{_MASK}_6GB",
    "COCO-Detection/faster_rcnn_R_50_FPN_3x_4GB",
    "COCO-Detection/retinanet_R_50_FPN_3x_6GB",
    f"{_MASK}_4GB",
    "COCO-InstanceSegmentation/mask_rcnn_R_101_FPN_3x_8GB",
    "COCO-Detection/faster_rcnn_X_101_32x8d_FPN_3x_8GB",
)
_TECHNIQUES = (
    "ActivationCheckpointing",
    "ActivationOffload",
    "MixedPrecision",
    "ChunkedHeads",
    "ChunkedMatching",
    "OptimizerImplementation",
)


_NO_EVALUATION = ("DATASETS.TEST", "()")


@dataclass(frozen=True)
class Scale:
    """How much is measured: all of it at full size, or little of it, small, as a rehearsal."""

    num_items: Optional[int]  # of each list; None is all
    rounds: int  # of each time
    seconds: float  # of each speed of the calibration
    case: Optional[WorstCase]  # None is that of the config
    opts: tuple[Any, ...]  # KEY VALUE pairs for all configs

    @classmethod
    def of(cls, device: torch.device) -> "Scale":
        if device.type == "cuda":
            return cls(None, 7, 1.0, None, ())
        small = WorstCase(((128, 160),), 5, (256, 320), (256, 320))
        few = ["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16, "MODEL.RPN.POST_NMS_TOPK_TRAIN", 50]
        few += ["MODEL.RPN.POST_NMS_TOPK_TEST", 20, "TEST.DETECTIONS_PER_IMAGE", 5]
        return cls(1, 1, 0.02, small, tuple(few))

    def cfg(self, config: str, device: torch.device, *opts: Any) -> CfgNode:
        return load_cfg(config, [*self.opts, "MODEL.DEVICE", str(device), *opts])

    def dry_job(self, cfg: CfgNode) -> DryJob:
        device = torch.device(cfg.MODEL.DEVICE)
        return DryJob(cfg, 1, DeviceModel.choose(None, str(device)), self.case or worst_case(cfg))


def describe_machine(device: torch.device, scale: Scale) -> Iterator[Record]:
    """What the figures depend on."""
    record: Record = {
        "card": platform.processor() or platform.machine(),
        "rehearsal": device.type == "cpu",
        "d2_memfit": __version__,
        "detectron2": "main" if compat.SAVES_INNER_TRAINER else "v0.6",
        "pytorch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record.update(
            card=properties.name,
            total_gb=properties.total_memory / _GB,
            capability=f"{properties.major}.{properties.minor}",
            cuda=torch.version.cuda,
            cudnn=torch.backends.cudnn.version(),
        )
    yield record


def run_checks(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Whether CUDA's own path is right."""
    checks = {**GPU_CHECKS, **CHECKS} if device.type == "cuda" else CHECKS
    for name in list(checks)[: scale.num_items]:
        yield {"name": name, **_attempt(partial(_passed, checks[name], device), device)}


def measure_calibration(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Speeds, and what libraries take: the content of a device file."""
    yield calibrate(device, scale.seconds)


def measure_outside(device: torch.device, scale: Scale) -> Iterator[Record]:
    """What the process takes of the device beside PyTorch's allocator, as more of it is used.

    This must be the first in its process. Other processes on the device would count too.
    """
    x = torch.zeros(1, device=device)
    yield {"after": "the first tensor", "mb": _outside_bytes(device) / _MB}
    torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
    yield {"after": "a product of matrices (cuBLAS)", "mb": _outside_bytes(device) / _MB}
    torch.nn.functional.conv2d(x.expand(1, 8, 32, 32), x.expand(8, 8, 3, 3))
    yield {"after": "a convolution (cuDNN)", "mb": _outside_bytes(device) / _MB}
    in_float16 = ["SOLVER.AMP.ENABLED", True]  # which a CPU computes very slowly
    for name, opts in [("", []), (" in float16", in_float16)][: scale.num_items]:
        job = scale.dry_job(scale.cfg(_MASK, device, "SOLVER.IMS_PER_BATCH", 1, *opts))
        phases = iter((f"training a Mask R-CNN{name}", f"evaluating it{name}"))
        for _ in run_for_real(job, str(device)):
            yield {"after": next(phases), "mb": _outside_bytes(device) / _MB}


def measure_zoo(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Estimates against the same jobs run for real: configs of the zoo, as few images as fit."""
    for config in _ZOO[: scale.num_items]:
        yield {"config": config, **_attempt(partial(_compare_zoo, config, device, scale), device)}


def measure_presets(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Presets under their caps: the card of each size, simulated on this one."""
    for config in _PRESETS[: scale.num_items]:
        record = _attempt(partial(_compare_preset, config, device, scale), device)
        yield {"config": config, **record}


def measure_recovery(device: torch.device, scale: Scale) -> Iterator[Record]:
    """A batch that does not fit, of a real Mask R-CNN, against the same with enough memory."""
    yield _attempt(partial(_recover, device, scale), device)


def measure_techniques(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Memory and time of a step with one technique, against those without."""
    for num_images in (2, 1):
        without = _attempt(partial(_step_of, None, num_images, device, scale), device)
        if "error" not in without:
            break
    yield {"technique": None, **without}
    for name in _TECHNIQUES[: scale.num_items]:
        record = _attempt(partial(_step_of, name, num_images, device, scale), device)
        if "seconds" in record and "seconds" in without:
            record["time_factor"] = record["seconds"] / without["seconds"]
            predicted = record["predicted_seconds"] / without["predicted_seconds"]
            record["predicted_time_factor"] = predicted
        yield {"technique": name, **record}


def measure_plain(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Detectron2's own trainer, and ours, with the same model and images."""
    one_by_one = partial(AccumulatingTrainer, accumulation_steps=2)
    with_recovery = partial(AccumulatingTrainer, recovery=RecoveryOptions())
    for name, make, num_images in (
        ("Detectron2", SimpleTrainer, 2),
        ("d2_memfit", AccumulatingTrainer, 2),
        ("d2_memfit, with recovery", with_recovery, 2),
        ("d2_memfit, one image at a time", one_by_one, 1),
    ):
        record = _attempt(partial(_train, make, num_images, device, scale), device)
        yield {"trainer": name, **record}


# By name, in the order in which they are measured: the most telling first.
JOBS: dict[str, Callable[[torch.device, Scale], Iterator[Record]]] = {
    "machine": describe_machine,
    "checks": run_checks,
    "calibration": measure_calibration,
    "zoo": measure_zoo,
    "presets": measure_presets,
    "recovery": measure_recovery,
    "techniques": measure_techniques,
    "outside": measure_outside,
    "plain": measure_plain,
}


def _attempt(measure: Callable[[], Record], device: torch.device) -> Record:
    """A record, or one that says what went wrong, with nothing left on the device."""
    try:
        return measure()
    except Exception as e:
        text = " ".join(str(e).split())[:500]
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        error = {"error": f"{type(e).__name__}: {text} ({where})"}
    with suppress(RuntimeError):  # after some errors nothing works on a GPU
        release_memory(device)
    return error


def _passed(check: Callable[[torch.device], None], device: torch.device) -> Record:
    check(device)
    release_memory(device)
    return {"passed": True}


def _outside_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return process_memory().data_bytes
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _compare_zoo(config: str, device: torch.device, scale: Scale) -> Record:
    for num_images in (2, 1):
        job = scale.dry_job(scale.cfg(config, device, "SOLVER.IMS_PER_BATCH", num_images))
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**50
        if job.total_bytes() < free:
            return {"images": num_images, **_compare(job, device)}
    raise MemfitError(f"one image needs {job.total_bytes() / _GB:.2f} GB")


def _compare_preset(config: str, device: torch.device, scale: Scale) -> Record:
    cfg = with_budget(scale.cfg(config, device))
    job = scale.dry_job(cfg)
    budget_bytes = int(cfg.MEMFIT.BUDGET_GB * _GB)
    record = {"budget_gb": cfg.MEMFIT.BUDGET_GB, "images": job.micro_batch_sizes()[0]}
    if device.type == "cpu":
        return {**record, **_compare(job, device)}
    if budget_bytes > torch.cuda.get_device_properties(device).total_memory:
        raise MemfitError("this card is smaller")
    _load_kernels(device)  # which are part of the context
    with limited(device, budget_bytes - cuda_context_bytes(device)):
        return {**record, **_compare(job, device, job.limit_bytes)}


def _load_kernels(device: torch.device) -> None:
    x = torch.ones(1, 8, 32, 32, device=device, requires_grad=True)
    torch.nn.functional.conv2d(x, x.new_ones(8, 8, 3, 3)).flatten(2).matmul(
        x.new_ones(900, 8)
    ).sum().backward()


def _compare(job: DryJob, device: torch.device, limit_bytes: Optional[int] = None) -> Record:
    """What a job was estimated to take in training and evaluation, and what it takes."""
    uses: list[DeviceUse] = job._uses(limit_bytes)
    record: Record = {"predicted_seconds": job.seconds()}
    phases = (("training", job.training), ("evaluation", job.evaluation))
    with peaks_of(device) as peaks:
        for (phase, timeline), use, _ in zip(phases, uses, run_for_real(job, str(device))):
            allocated, reserved = peaks.take()
            estimated = _allocated_bytes(timeline, use, device)
            if device.type == "cuda":
                record[f"{phase}_reserved_gb"] = reserved / _GB
                record[f"{phase}_estimated_reserved_gb"] = use.reserved_bytes / _GB
                outside = _outside_bytes(device)
                record[f"{phase}_device_gb"] = (reserved + outside) / _GB
                record[f"{phase}_estimated_device_gb"] = use.total_bytes / _GB
            record[f"{phase}_gb"] = allocated / _GB
            record[f"{phase}_estimated_gb"] = estimated / _GB
            record[f"{phase}_error"] = estimated / allocated - 1
    release_memory(device)
    return record


def _allocated_bytes(timeline: Optional[Timeline], use: DeviceUse, device: torch.device) -> int:
    """As :func:`peaks_of` measures it: of tensors alone on the CPU."""
    assert timeline is not None
    return use.allocated_bytes if device.type == "cuda" else sum(timeline.peak().values())


def _recover(device: torch.device, scale: Scale) -> Record:
    cfg = scale.cfg(_MASK, device, "MODEL.PIXEL_STD", [300.0] * 3)
    if scale.num_items is not None:
        cfg = tiny_cfg("mask_rcnn", device=device)
    batch = images(8, size=512, num_instances=5)

    def trainer(loader: Any, **options: Any) -> AccumulatingTrainer:
        seed_all()
        model, _ = build_with_values(cfg, str(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        return AccumulatingTrainer(model, loader, optimizer, **options)

    peaks = {}
    for num_images in (1, 8):
        probe = trainer(repeat(batch[:num_images]))
        iterate(probe)
        probe.optimizer.zero_grad(set_to_none=True)
        with peaks_of(device) as peak:
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            iterate(probe)
            peaks[num_images] = peak.take()[0] - before
        del probe
        release_memory(device)
    enough = trainer(repeat(batch), images_per_micro_batch=4)
    iterate(enough, 3)
    seconds = median_seconds(partial(iterate, enough), device, scale.rounds)
    weights = {k: v.cpu() for k, v in parameters(enough.model).items()}
    del enough
    release_memory(device)
    limited_trainer = trainer(repeat(batch), recovery=RecoveryOptions())
    # The optimizer's states are made in the first iteration, so that the limit has room for them.
    states = sum(p.numel() * p.element_size() for p in limited_trainer.model.parameters())
    with limited(device, (peaks[1] + 3 * peaks[8]) // 4 + states):
        iterate(limited_trainer, 3)
        recovered = median_seconds(partial(iterate, limited_trainer), device, scale.rounds)
    recovery = limited_trainer.recovery
    assert recovery is not None
    after = {k: v.cpu() for k, v in parameters(limited_trainer.model).items()}
    return {
        "images": len(batch),
        "oom_events": recovery.oom_events,
        "micro_batch": recovery.size.images,
        "seconds_with_enough_memory": seconds,
        "seconds_under_the_limit": recovered,
        "relative_difference_of_weights": relative_difference(after, weights),
    }


def _step_of(name: Optional[str], num_images: int, device: torch.device, scale: Scale) -> Record:
    """A training step at full size with one technique."""
    cfg = scale.cfg(_MASK, device, "SOLVER.IMS_PER_BATCH", num_images, *_NO_EVALUATION)
    job = scale.dry_job(with_settings(cfg, get_technique(name).settings(cfg) if name else {}))
    expected = _allocated_bytes(job.training, job._uses()[0], device)
    with peaks_of(device) as peaks:
        runs = _Steps(job, device)
        runs.step()
        peaks.take()
        runs.step()
        allocated, _ = peaks.take()
    record = {
        "images": num_images,
        "gb": allocated / _GB,
        "estimated_gb": expected / _GB,
        "seconds": median_seconds(runs.step, device, scale.rounds),
        "predicted_seconds": job.seconds(),
    }
    del runs
    release_memory(device)
    return record


class _Steps:
    """Steps of a trainer on the worst batch of a job, with weights of 0 as for a probe."""

    def __init__(
        self, job: DryJob, device: torch.device, make: Callable[..., Any] = AccumulatingTrainer
    ) -> None:
        self._cfg, self._batch = job.cfg, job.training_batch()
        model, optimizer = build_with_values(job.cfg, str(device))
        for p in model.parameters():
            if p.dim() > 1:
                p.data.zero_()
        options = {}
        if job.cfg.SOLVER.AMP.ENABLED:
            options["precision"] = "bf16" if job.cfg.MEMFIT.AMP_DTYPE == "bfloat16" else "fp16"
        self._trainer = make(model, repeat(self._batch), optimizer, **options)

    def step(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(EventStorage())
            stack.enter_context(worst_proposals(self._trainer.model, self._cfg, self._batch))
            self._trainer.iter = 0
            self._trainer.run_step()


def _train(make: Callable[..., Any], num_images: int, device: torch.device, scale: Scale) -> Record:
    opts = ("SOLVER.IMS_PER_BATCH", num_images, *_NO_EVALUATION)
    job = scale.dry_job(scale.cfg(_MASK, device, *opts))
    with peaks_of(device) as peaks:
        steps = _Steps(job, device, make)
        steps.step()
        peaks.take()
        steps.step()
        allocated, reserved = peaks.take()
    seconds = median_seconds(steps.step, device, scale.rounds)
    del steps
    release_memory(device)
    return {"gb": allocated / _GB, "reserved_gb": reserved / _GB, "seconds": seconds}
