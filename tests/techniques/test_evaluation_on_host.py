# Copyright (c) the d2_memfit developers.

import pytest
import torch
from benchmarks.detr_like import add_detr_config
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling.postprocessing import sem_seg_postprocess
from detectron2.structures import Instances
from tiny import images, tiny_cfg, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2_memfit.common import GB
from d2_memfit.job import Job
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.text import describe_estimate
from d2_memfit.techniques.evaluation_on_host import _PastedMasks
from d2_memfit.techniques.registry import get_technique


def apply(model):
    return get_technique("EvaluationOnHost").apply(model, tiny_cfg())


def outputs(model, batch):
    with torch.no_grad():
        return model.eval()(batch)


def batch_of(size):
    """Images that come from files of this size."""
    return [{**image, "height": size, "width": size + 10} for image in images(2)]


def test_the_evaluators_json_is_the_same():
    plain = outputs(tiny_model(tiny_cfg("mask_rcnn")), batch_of(100))
    lazy = outputs(apply(tiny_model(tiny_cfg("mask_rcnn"))), batch_of(100))
    for p, x in zip(plain, lazy):
        assert len(p["instances"]) > 0
        assert isinstance(x["instances"].pred_masks, _PastedMasks)
        expected = instances_to_coco_json(p["instances"], 1)
        assert instances_to_coco_json(x["instances"].to("cpu"), 1) == expected


def test_memory_does_not_grow_with_the_number_of_masks():
    cfg = tiny_cfg("mask_rcnn")
    batch, peaks = batch_of(1000)[:1], []
    for model in (tiny_model(cfg), apply(tiny_model(cfg))):
        with TensorMeter() as meter:
            (result,) = outputs(model, batch)
            instances_to_coco_json(result["instances"], 1)
        peaks.append(meter.peak_bytes)
    masks = len(result["instances"]) * 1000 * 1010
    assert peaks[0] > masks
    assert peaks[1] < peaks[0] - 0.7 * masks


def cfg_with_queries():
    cfg = tiny_cfg()
    add_detr_config(cfg)
    cfg.MODEL.META_ARCHITECTURE = "SmallDetr"
    cfg.TEST.DETECTIONS_PER_IMAGE = 20
    return cfg


def model_with_queries():
    return tiny_model(cfg_with_queries())


def photograph(height, width):
    """A batch with one image that comes from a file of this size."""
    return [{**images(1)[0], "height": height, "width": width}]


def test_results_of_queries_are_the_same_and_are_made_on_the_host():
    plain = outputs(model_with_queries(), batch_of(100))
    found = outputs(apply(model_with_queries()), batch_of(100))
    for p, f in zip(plain, found):
        for name, value in p["instances"].get_fields().items():
            other = f["instances"].get(name)
            assert torch.equal(getattr(other, "tensor", other), getattr(value, "tensor", value))
        expected = instances_to_coco_json(p["instances"], 1)
        assert instances_to_coco_json(f["instances"].to("cpu"), 1) == expected
        assert len(expected) == 20
        assert torch.equal(f["panoptic_seg"][0], p["panoptic_seg"][0])
        assert f["panoptic_seg"][1] == p["panoptic_seg"][1]


def test_an_estimate_states_device_and_host_for_100_queries_at_20_megapixels():
    """Mask2Former's inference has five tensors of all masks as numbers."""
    masks_gb = 5 * 100 * 3648 * 5472 * 4 / GB
    cfg = cfg_with_queries()
    cfg.MODEL.DETR.NUM_OBJECT_QUERIES = cfg.TEST.DETECTIONS_PER_IMAGE = 100
    cfg.MODEL.DETR.PANOPTIC = False
    found = []
    for cfg.MEMFIT.EVALUATION.ON_HOST in (False, True):
        job = Job.from_cfg(cfg, 1, batch=photograph(3648, 5472))
        found.append(DryJob(job, DeviceModel.load("cuda")).estimate())
    plain, on_host = found
    assert plain.evaluation_gb == pytest.approx(masks_gb, rel=0.01)
    assert plain.evaluation_host_gb == 0
    assert on_host.evaluation_gb < 0.05
    assert on_host.evaluation_host_gb == pytest.approx(masks_gb, rel=0.01)
    assert "evaluation host, GB" in describe_estimate(on_host)


class OnDevice(torch.Tensor):
    """A tensor that says that it is on another device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(kind is not cls for kind in types):
            return NotImplemented  # the other class comes next
        if func is torch.Tensor.device.__get__:
            return torch.device("cuda")
        result = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.Tensor.cpu, torch.Tensor.to):
            return torch.from_numpy(result.numpy())
        return result


class OneDevice(TorchDispatchMode):
    """Like PyTorch, refuses operators of tensors on two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_index = func is torch.ops.aten.index.Tensor
        if not is_index and len({isinstance(t, OnDevice) for t in tensors if t.dim()}) > 1:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        return func(*args, **(kwargs or {}))


class LikeMaskFormer(torch.nn.Module):
    """MaskFormer's inference: the scores of the queries stay on the device of the model."""

    def forward(self, batch):
        scores, masks = (torch.rand(*s).as_subclass(OnDevice) for s in ((20, 4), (20, 32, 32)))
        masks = sem_seg_postprocess(masks, (30, 32), batch[0]["height"], batch[0]["width"])
        best = scores.max(-1)[0]
        keep = torch.ones(20, dtype=torch.bool, device=masks.device)
        semantic = torch.einsum("qc,qhw->chw", scores[keep], masks.sigmoid()[keep])
        chosen = masks[best.topk(5)[1]]
        instances = Instances(masks.shape[1:], pred_masks=(chosen > 0).float())
        instances.scores = best[:5] * (chosen.flatten(1).sum(1) / chosen[0].numel())
        best_of_pixel = (best.view(-1, 1, 1) * masks).argmax(0)
        on_device = torch.zeros_like(scores)
        on_device[0] = masks[0, 0, :4]
        return on_device, masks, [instances.pred_masks, instances.scores, semantic, best_of_pixel]


def test_what_meets_masks_on_the_host_comes_there_and_nothing_else():
    with OneDevice():
        on_device, masks, on_host = apply(LikeMaskFormer().eval())(photograph(70, 90))
    assert type(on_device) is OnDevice
    assert torch.equal(on_device[0].cpu(), masks[0, 0, :4])
    assert [t.device.type for t in on_host] == ["cpu"] * 4
    assert on_host[2].shape == (4, 70, 90)
