# Copyright (c) the d2_memfit developers.
"""A dry run against the same step really computed."""

import re
from pathlib import Path
from types import FunctionType

import pytest
import torch
from benchmarks.detr_like import add_detr_config
from detectron2.config import LazyConfig, instantiate
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.meta_arch import retinanet
from detectron2.projects.point_rend import add_pointrend_config
from fvcore.nn import sigmoid_focal_loss
from tiny import owners_at_peak, peak_of, sized
from torch import nn

from d2_memfit.config.files import find_config_file
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.memory import process_memory
from d2_memfit.planner.dry_run import DryRun
from d2_memfit.planner.meta import is_fake, make_fake
from d2_memfit.planner.stand_ins import _TO_FLOAT32, casts_of_cuda, cuda_as_cpu
from d2_memfit.planner.steps import Session
from d2_memfit.planner.values import WithoutValues

CASE = ((160, 224), 7)

# Real models, narrow and with images and numbers of proposals that can be computed quickly.
SMALL = [
    *("MODEL.DEVICE", "cpu", "MODEL.PIXEL_STD", [300.0, 300.0, 300.0]),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 24, "TEST.DETECTIONS_PER_IMAGE", 5),
    *("MODEL.RPN.POST_NMS_TOPK_TRAIN", 60, "MODEL.RPN.POST_NMS_TOPK_TEST", 20),
]
AMP = ["SOLVER.AMP.ENABLED", True, "MEMFIT.AMP_DTYPE", "bfloat16"]
NARROW = [
    *("MODEL.RESNETS.WIDTH_PER_GROUP", 16, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64),
    *("MODEL.FPN.OUT_CHANNELS", 64, "MODEL.ROI_MASK_HEAD.CONV_DIM", 64),
    *("MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", [64, 64], "MODEL.ROI_BOX_HEAD.FC_DIM", 256),
]
GN = [  # of 32 groups. A CPU computes in 16 bits slowly.
    *("MODEL.RESNETS.WIDTH_PER_GROUP", 32, "MODEL.RESNETS.RES2_OUT_CHANNELS", 128),
    *("MODEL.FPN.OUT_CHANNELS", 32, "MODEL.ROI_MASK_HEAD.CONV_DIM", 32),
    *("MODEL.ROI_BOX_HEAD.CONV_DIM", 32, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 8),
]
MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"

# Narrow layers and many points, so that the peak is in the mask head.
POINTREND = [
    *("INPUT.MASK_FORMAT", "bitmask", "MODEL.ROI_BOX_HEAD.TRAIN_ON_PRED_BOXES", True),
    *("MODEL.ROI_MASK_HEAD.NAME", "PointRendMaskHead", "MODEL.ROI_MASK_HEAD.POOLER_TYPE", ""),
    *("MODEL.ROI_MASK_HEAD.POINT_HEAD_ON", True, "MODEL.POINT_HEAD.TRAIN_NUM_POINTS", 600),
    *("MODEL.ROI_MASK_HEAD.FC_DIM", 16, "MODEL.ROI_BOX_HEAD.FC_DIM", 16),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 64, "TEST.DETECTIONS_PER_IMAGE", 30),
]

DETR = [
    *("MODEL.META_ARCHITECTURE", "SmallDetr", "INPUT.MASK_FORMAT", "bitmask"),
    *("MODEL.DETR.NUM_POINTS", 2000, "MODEL.DETR.NUM_OBJECT_QUERIES", 100),
]

JOBS = {
    "faster C4": ("COCO-Detection/faster_rcnn_R_50_C4_1x.yaml", []),
    "faster DC5": ("COCO-Detection/faster_rcnn_R_50_DC5_1x.yaml", []),
    "faster FPN": ("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", []),
    "mask FPN": (MASK, []),
    "mask FPN, bit masks": (MASK, ["INPUT.MASK_FORMAT", "bitmask"]),
    "keypoint": ("COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x.yaml", []),
    "cascade": ("Misc/cascade_mask_rcnn_R_50_FPN_1x.yaml", []),
    "retinanet": ("COCO-Detection/retinanet_R_50_FPN_1x.yaml", []),
    "rpn": ("COCO-Detection/rpn_R_50_FPN_1x.yaml", []),
    "fast, proposals given": ("COCO-Detection/fast_rcnn_R_50_FPN_1x.yaml", []),
    "panoptic": ("COCO-PanopticSegmentation/panoptic_fpn_R_50_1x.yaml", []),
    "semantic": (
        "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x.yaml",
        ["MODEL.META_ARCHITECTURE", "SemanticSegmentor"],
    ),
    "PointRend": (MASK, POINTREND),
    "GN": ("Misc/mask_rcnn_R_50_FPN_3x_gn.yaml", GN),
    "BN": (MASK, ["MODEL.RESNETS.NORM", "BN", "MODEL.BACKBONE.FREEZE_AT", 0]),
    "SyncBN": (MASK, ["MODEL.RESNETS.NORM", "SyncBN", "MODEL.FPN.NORM", "SyncBN"]),
    "deformable": ("Misc/mask_rcnn_R_50_FPN_1x_dconv_c3-c5.yaml", []),
    "clipping": (MASK, ["SOLVER.CLIP_GRADIENTS.ENABLED", True]),
    "bfloat16": (MASK, AMP),
    "GN, float16": ("Misc/mask_rcnn_R_50_FPN_3x_gn.yaml", [*GN, "SOLVER.AMP.ENABLED", True]),
    "GN, bfloat16, checkpointing": (
        "Misc/mask_rcnn_R_50_FPN_3x_gn.yaml",
        [*GN, *AMP, "MEMFIT.CHECKPOINT.MODULES", ["all"]],
    ),
    "micro-batches": (MASK, ["MEMFIT.MICRO_BATCH", 1]),
    "checkpointing": (MASK, ["MEMFIT.CHECKPOINT.MODULES", ["all"]]),
    "offload": (MASK, ["MEMFIT.OFFLOAD.MODULES", ["backbone"]]),
    "chunked heads": (MASK, ["MEMFIT.HEADS.CHUNK_SIZE", 4]),
    "chunked matching": (MASK, ["MEMFIT.MATCHING.CHUNK_SIZE", 512]),
    "queries": (MASK, DETR),
    "queries, masks as bits": (MASK, [*DETR, "MEMFIT.MASKS.PACKED", True]),
    "queries, masks on the host": (MASK, [*DETR, "MEMFIT.EVALUATION.ON_HOST", True]),
    "FCOS": (MASK, ["MODEL.META_ARCHITECTURE", "FcosOfTests"]),
    "a user's own": (
        MASK,
        [
            *("MODEL.META_ARCHITECTURE", "SegmenterOfTests"),
            *(
                "DATASETS.TRAIN",
                ("ade20k_sem_seg_train",),
                "DATASETS.TEST",
                ("ade20k_sem_seg_val",),
            ),
        ],
    ),
    "all together": (
        MASK,
        [*AMP, "MEMFIT.CHECKPOINT.MODULES", ["all"], "MEMFIT.HEADS.CHUNK_SIZE", 4],
    ),
}


@META_ARCH_REGISTRY.register()
def FcosOfTests(cfg):
    """How a LazyConfig's model can be named in a config."""
    file = find_config_file("COCO-Detection/fcos_R_50_FPN_1x", ".py")
    model = LazyConfig.load(file).model
    model.pixel_std = cfg.MODEL.PIXEL_STD
    model.head.norm = "BN"  # v0.6 makes a GroupNorm that current PyTorch refuses
    return instantiate(model)


@META_ARCH_REGISTRY.register()
class SegmenterOfTests(nn.Module):
    """A user's own model, with nothing of Detectron2's in it."""

    def __init__(self, cfg):
        super().__init__()
        layers = [nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, batch):
        images = torch.stack([d["image"][:, :160, :160] for d in batch])
        scores = self.head(self.features(images.float()).permute(0, 2, 3, 1))
        if not self.training:
            return [{"sem_seg": s.argmax(dim=-1)} for s in scores]
        labels = torch.stack([d["sem_seg"][:160:2, :160:2] for d in batch])
        return {"loss": nn.functional.cross_entropy(scores.permute(0, 3, 1, 2), labels)}


def make_cfg(name):
    file, opts = JOBS[name]
    cfg = load_cfg(file, [*SMALL, *NARROW, *opts], [add_pointrend_config, add_detr_config])
    if cfg.MODEL.BACKBONE.NAME == "build_resnet_fpn_backbone" and name != "mask FPN":
        cfg.MODEL.BACKBONE.NAME = "build_short_resnet_fpn_backbone"
    return cfg


def train(cfg):
    job = Job.from_cfg(cfg, 2, **sized(cfg, *CASE))
    batches = [job.training_batch(1)] * 2 if cfg.MEMFIT.MICRO_BATCH else [job.training_batch(2)]
    return Session(job).train(*batches)


@pytest.mark.parametrize("opts", [[], AMP])
def test_the_first_dry_run_of_a_process_is_like_later_ones(monkeypatch, opts):
    """PyTorch optimises RetinaNet's focal loss after its first call."""
    loss = FunctionType(sigmoid_focal_loss.__code__, sigmoid_focal_loss.__globals__, "loss")
    loss.__defaults__ = sigmoid_focal_loss.__defaults__
    loss.__annotations__ = sigmoid_focal_loss.__annotations__
    monkeypatch.setattr(retinanet, "sigmoid_focal_loss_jit", torch.jit.script(loss))
    cfg = load_cfg("COCO-Detection/retinanet_R_50_FPN_1x.yaml", [*SMALL, *opts])
    job = Job.from_cfg(cfg, 1, **sized(cfg, *CASE))
    first, second, third = (Session(job).train(job.training_batch(1)) for _ in range(3))
    assert first.flops == second.flops == third.flops
    assert owners_at_peak(first) == owners_at_peak(second) == owners_at_peak(third)


def owners_of(timeline):
    return {owner: size for owner, size in owners_at_peak(timeline).items() if size}


SLOW = {"GN, float16": [pytest.mark.slow]}


@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, [])) for n in JOBS])
def test_a_step_has_the_memory_of_one_that_is_computed(name, computing):
    cfg = make_cfg(name)
    dry = train(cfg)
    computing()
    computed = train(cfg)
    peak, expected = peak_of(dry), peak_of(computed)
    assert peak == pytest.approx(expected, rel=0.001)
    assert dry.flops == computed.flops
    for owner, size in owners_of(computed).items():
        assert owners_of(dry).get(owner, 0) == pytest.approx(size, rel=0.01, abs=2**16)


@pytest.mark.parametrize("name", ["mask FPN", "retinanet", "panoptic", "FCOS", "queries"])
def test_memory_is_on_the_line_through_2_and_3_images(name):
    cfg = make_cfg(name)
    job = Job.from_cfg(cfg, 1, **sized(cfg, (640, 800), 7))
    two, three, six = (
        peak_of(Session(job, False, False).train(job.training_batch(n))) for n in (2, 3, 6)
    )
    assert six == pytest.approx(three + 3 * (three - two), rel=0.001)


def test_the_last_micro_batch_alone_has_the_peak_of_an_iteration():
    cfg = make_cfg("mask FPN")
    job = Job.from_cfg(cfg, 1, **sized(cfg, *CASE))
    batch = job.training_batch(1)
    whole = Session(job).train(batch, batch, batch)
    last = Session(job).train(batch, accumulates=True)
    assert peak_of(last) == peak_of(whole)


def test_small_weights_stay_though_gradients_are_not_numbers():
    cfg = make_cfg("mask FPN")
    job = Job.from_cfg(cfg, 1, **sized(cfg, *CASE))
    session, batch = Session(job, foreach=False), job.training_batch(1)
    biases = [p for p in session.model.parameters() if p.requires_grad and not is_fake(p)]
    before = [p.detach().clone() for p in biases]
    for p in biases:
        p.register_hook(lambda gradient: gradient * torch.nan)
    session.train(batch)
    assert biases
    assert all(map(torch.equal, biases, before))


@pytest.mark.parametrize(
    "name",
    [
        *("mask FPN", "panoptic", "PointRend", "FCOS", "a user's own", "queries"),
        "queries, masks on the host",
    ],
)
def test_an_evaluation_has_the_memory_of_one_that_is_computed(name, computing):
    cfg = make_cfg(name)
    job = Job.from_cfg(cfg, 1, **sized(cfg, *CASE))
    batch = job.batches.evaluation()
    dry = Session(job).evaluate(batch)
    computing()
    computed = Session(job).evaluate(batch)
    assert peak_of(dry) == pytest.approx(peak_of(computed), rel=0.001)


def test_nothing_large_is_computed_or_touched():
    cfg = load_cfg(MASK)
    job = Job.from_cfg(cfg, 1, **sized(cfg, (800, 1333), 20))
    before = process_memory().peak_resident_bytes
    timeline = Session(job).train(job.training_batch(4))
    assert peak_of(timeline) > 4 * 2**30
    assert process_memory().peak_resident_bytes < before + 1.5 * 2**30


def test_what_is_made_of_fake_tensors_is_fake_if_it_is_large():
    weight = make_fake(torch.ones(1000, 1000))
    with WithoutValues():
        product = torch.ones(1000, 1000) @ weight
        assert is_fake(product)
        assert product.shape == (1000, 1000)
        assert torch.equal(product[:2].clone(), torch.zeros(2, 1000))  # small: zeros
        assert is_fake(product.t())
        assert is_fake(product.relu_())
        assert product.isfinite().all()
        assert product[torch.ones(1000, dtype=torch.bool)].shape == (1000, 1000)
        assert not is_fake(torch.arange(10**6).float() * 2)  # nothing fake went in
        assert is_fake(make_fake(torch.ones(9)).half())  # small weights are still weights
        trained = torch.ones(1, requires_grad=True)
        assert is_fake(torch.arange(10**6).float() * trained)  # as a prediction
        assert len(product.gt(0).nonzero()) == 0  # of unknown values, none counts


def test_memory_that_nothing_is_written_to_has_zeros():
    shapes = [(num,) for num in range(1, 2000, 50)]
    freed = [torch.full(shape, torch.nan) for shape in shapes]
    del freed
    with WithoutValues():
        made = [torch.empty(shape) for shape in shapes]
        for tensor in made:
            tensor.copy_(make_fake(torch.ones_like(tensor)))
    assert not any(tensor.isnan().any() for tensor in made)


@pytest.mark.parametrize("num", [10, 2**18])
def test_boxes_without_values_are_valid(num):
    """As DETR, OneNet and detrex assert."""
    with WithoutValues():
        weight = make_fake(torch.ones(256, 4))
        x, y, width, height = (torch.ones(num, 256) @ weight).sigmoid().unbind(-1)
        sides = [x - 0.5 * width, y - 0.5 * height, x + 0.5 * width, y + 0.5 * height]
        boxes = torch.stack(sides, dim=-1)
        assert is_fake(boxes) == (boxes.nbytes >= 2**20)
        assert (boxes[:, 2:] >= boxes[:, :2]).all()


def test_mixed_precision_has_the_formats_of_a_gpu():
    x = torch.ones(2, 8, 4, 4, dtype=torch.bfloat16)
    weight = torch.ones(8, 8, 1, 1)

    def formats():
        results = nn.functional.group_norm(x, 4), x.softmax(dim=1), x**2, x.relu()
        return [result.dtype for result in results]

    in_32, in_16 = torch.float32, torch.bfloat16
    with cuda_as_cpu(casts_of_cuda()):
        assert formats() == [in_16] * 4  # without autocast nothing changes
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert formats() == [in_32, in_32, in_32, in_16]
            assert nn.functional.conv2d(x, weight).dtype == in_16


def test_the_functions_in_float32_are_those_of_pytorchs_header():
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    macros = re.findall(
        r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)((?:.*\\\n)*.*\n)", header.read_text()
    )
    assert len(macros) == 2
    names = {name for macro in macros for name in re.findall(r"_\((\w+)", macro)}
    names = {re.sub(r"^_?upsample_.*", "interpolate", name) for name in names}
    names = {name.replace("linalg_", "") for name in names - {"nll_loss2d"}}
    made_of_them = {"cross_entropy", "norm", "normalize", "softmin"}
    methods = {"__pow__", "__rdiv__", "__rpow__", "__rtruediv__"}
    assert names <= _TO_FLOAT32
    newer = {"rms_norm"}  # than the oldest PyTorch
    assert not _TO_FLOAT32 - names - made_of_them - methods - newer


def test_an_operator_without_a_meta_kernel_computes_with_zeros():
    @torch.library.custom_op("d2_memfit_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with WithoutValues():
        assert torch.equal(double(make_fake(torch.ones(2**20))), torch.zeros(2**20))


@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (4, False), (1, True)])
def test_the_backward_of_a_convolution_computes_twice_what_the_forward_does(groups, transposed):
    layer = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = layer(8, 8, 3, groups=groups, bias=False)
    x = torch.zeros(2, 8, 10, 12, requires_grad=True)
    with DryRun(model) as run:
        run.phase = "forward"
        y = model(x)
        run.phase = "backward"
        y.backward(torch.ones_like(y))
    pixels = 10 * 12 if transposed else 8 * 10
    forward = 2 * 2 * pixels * 8 * (8 // groups) * 9
    assert run.timeline.flops == {"forward": forward, "backward": 2 * forward}
