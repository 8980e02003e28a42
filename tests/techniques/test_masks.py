# Copyright (c) the d2_memfit developers.
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from detectron2.structures import BitMasks, Instances
from detectron2.utils.events import EventStorage
from injection import seed_all
from tiny import image, relative_difference, tiny_cfg, tiny_model
from torchvision.ops import roi_align

from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.masks import MaskBits, _sharing, pack_masks, with_packed_masks
from d2_memfit.techniques.registry import apply_techniques

SIZES = [(40, 60), (33, 17), (8, 8), (1, 5)]


def masks(size=(40, 60), num=20, seed=0):
    return torch.rand(num, *size, generator=torch.Generator().manual_seed(seed)) > 0.5


def is_packed_tensor(value):
    return isinstance(value, MaskBits)


def assert_same(packed, plain, is_packed=True):
    assert is_packed_tensor(packed) == is_packed
    assert (packed.shape, packed.dtype) == (plain.shape, plain.dtype)
    assert torch.equal(packed.unpacked() if is_packed else packed, plain)


SHARED = {
    "one": lambda m: m[3],
    "a slice": lambda m: m[2:19:3],
    "numbers": lambda m: m[torch.tensor([4, 4, 19, 0])],
    "a selection": lambda m: m[torch.arange(20) % 3 == 0],
    "none": lambda m: m[:0],
    "a channel": lambda m: m[:, None].squeeze(1)[None],
    "float": lambda m: m.float(),
    "a batch": lambda m: m.view(4, 5, *m.shape[-2:])[torch.tensor([3, 0]), torch.tensor([1, 4])],
    "padded": lambda m: F.pad(m, (0, 7, 0, 3)),
    "joined": lambda m: torch.cat([m, m[3:5]]),
    "stacked": lambda m: torch.stack(list(m)),
    "copied": lambda m: m.clone().detach(),
}
COMPUTED = {
    "flat": lambda m: m.flatten(1),
    "a view of all pixels": lambda m: m.view(-1),
    "a selection of pixels": lambda m: torch.arange(m.numel()).view(m.shape)[m.bool()],
    "products of all pairs": lambda m: torch.einsum("nhw,mhw->nm", m.float(), m.float()),
    "turned": lambda m: m.permute(1, 2, 0),
    "sums": lambda m: m.float().sum((1, 2)),
    "products": lambda m: 2 * m.float() + m,
    "a crop": lambda m: m[:, 1:, :3],
    "enlarged": lambda m: F.interpolate(m[:, None].float(), size=(80, 70), mode="bilinear"),
    "nearest": lambda m: F.interpolate(m[:, None].float(), size=(13, 9), mode="nearest"),
    "padded at the left": lambda m: F.pad(m, (2, 0)),
    "joined with others": lambda m: torch.cat([m, torch.zeros_like(m[:2]).clone()]),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*SHARED, *COMPUTED])
def test_operators_give_what_they_give_for_the_masks(name, size):
    function = {**SHARED, **COMPUTED}[name]
    plain = masks(size)
    assert_same(function(pack_masks(plain)), function(plain), name in SHARED)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("are_same", [False, True])
def test_points_are_sampled_as_from_numbers_to_the_last_bit(size, mode, align, dtype, are_same):
    plain = masks(size)
    # Some are outside, some on the corners and between pixels.
    grid = torch.rand(20, 50, 2, 2, dtype=dtype) * 2.2 - 1.1
    grid[:, :5] = torch.tensor([-1, 1, 0, 0.5, -0.5], dtype=dtype)[:, None, None]
    if are_same:
        grid = grid[:1].repeat(20, 1, 1, 1)
    packed = pack_masks(plain)
    for change in (
        lambda m: m,
        lambda m: F.pad(m, (0, 7, 0, 3)),
        lambda m: m[:0],
        lambda m: m[[5]],
    ):
        expected, found = (
            F.grid_sample(m[:, None].to(dtype), grid[: len(m)], mode=mode, align_corners=align)
            for m in (change(plain), change(packed))
        )
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [(40, 60), (33, 17)])
def test_crops_are_those_of_bit_masks(size):
    plain = masks(size)
    corner = torch.rand(50, 2) * 5
    boxes = torch.cat([corner, corner + 1 + torch.rand(50, 2) * 20], dim=1)
    index = torch.randint(0, 20, (50,))
    for chosen in (index, index[:0], index[:1]):
        p, s = BitMasks(plain)[chosen], BitMasks(pack_masks(plain))[chosen]
        assert is_packed_tensor(s.tensor)
        expected = p.crop_and_resize(boxes[: len(p)], 14)
        assert torch.equal(s.crop_and_resize(boxes[: len(p)], 14), expected)
    rois = torch.cat([index[:, None], boxes], dim=1)
    expected, found = (roi_align(m.float()[:, None], rois, 14) for m in (plain, pack_masks(plain)))
    assert torch.equal(found, expected)
    assert torch.equal(s.nonempty(), p.nonempty())
    assert torch.equal(s.get_bounding_boxes().tensor, p.get_bounding_boxes().tensor)
    assert torch.equal(BitMasks.cat([s, s]).tensor, BitMasks.cat([p, p]).tensor)


@_sharing
def pad(images):
    size = [max(lengths) for lengths in zip(*(image.shape for image in images))]
    padded = torch.zeros((len(images), *size), dtype=images[0].dtype)
    outside = torch.ones((len(images), *size[1:]), dtype=torch.bool)
    for small, of_image, part in zip(images, padded, outside):
        of_image[: small.shape[0], : small.shape[1], : small.shape[2]].copy_(small)
        part[: small.shape[1], : small.shape[2]] = False
    return padded, outside


def test_padding_by_a_copy_into_zeros_shares_the_bits():
    plain = [masks((40, 60)), masks((33, 61), num=7, seed=1)]
    expected, found = pad(plain), pad([pack_masks(m) for m in plain])
    assert_same(found[0], expected[0])
    assert_same(torch.cat([found[0]] * 2), torch.cat([expected[0]] * 2))
    chosen = torch.tensor([1, 0, 0, 1]), torch.tensor([6, 3, 19, 19])
    assert_same(found[0].float()[chosen], expected[0].float()[chosen])
    assert torch.equal(found[1], expected[1])
    assert type(torch.zeros(3, 4, 5)) is torch.Tensor


def test_they_take_a_bit_a_pixel_and_chunks_of_numbers():
    plain = masks((256, 256), num=400)
    with TensorMeter() as meter:
        packed = pack_masks(plain)
        grid = torch.rand(400, 20, 1, 2)
        F.grid_sample(packed[torch.arange(400), None].float(), grid, align_corners=False)
        corner = torch.rand(400, 2) * 200
        BitMasks(packed).crop_and_resize(torch.cat([corner, corner + 40], dim=1), 14)
    bits = 400 * 256 * 256 // 8
    assert meter.peak_bytes < bits + 2**24


@pytest.mark.parametrize("value", [2, 0.5, -1, float("nan")])
def test_other_numbers_stay_as_they_are(value):
    plain = masks().float()
    plain[7, 3, 3] = value
    assert pack_masks(plain) is plain
    assert is_packed_tensor(pack_masks(masks().float()))


def test_masks_of_a_batch_are_packed_and_nothing_else():
    class Own(BitMasks):
        pass

    instances = Instances((40, 60), gt_masks=BitMasks(masks()), gt_classes=torch.zeros(20))
    own = Instances((40, 60), gt_masks=Own(masks()))
    image = torch.zeros(3, 40, 60)
    batch = [{"image": image, "instances": instances}, {"image": image, "instances": own}]
    first, second = with_packed_masks(batch)
    assert first["image"] is image
    assert_same(first["instances"].gt_masks.tensor, masks())
    assert first["instances"].gt_classes is instances.gt_classes
    assert second["instances"].gt_masks is own.gt_masks
    assert type(instances.gt_masks.tensor) is torch.Tensor
    (target,) = with_packed_masks([{"masks": masks(), "labels": torch.zeros(20)}])
    assert_same(target["masks"], masks())
    assert_same(with_packed_masks([masks()], "mask_labels")[0], masks())
    assert with_packed_masks([image], "images")[0] is image
    assert with_packed_masks(image, "pixel_mask") is image
    assert with_packed_masks([None, "x"], "masks") == [None, "x"]


class ComparesAllPixels(torch.nn.Module):
    """Keeps whole masks for the backward."""

    def __init__(self):
        super().__init__()
        self.part = torch.nn.Sequential(Compares(), Compares())

    def forward(self, masks):
        return self.part[0](masks) + self.part[1](masks)


class Compares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(20, 300, 300))

    def forward(self, masks):
        return F.binary_cross_entropy_with_logits(self.weight * masks[0].float(), masks[0].float())


@pytest.mark.parametrize("context", [nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("modules", [[], ["all"], ["*"]])
@pytest.mark.parametrize("offloaded", [[], ["*"]])
def test_whole_masks_are_kept_for_the_backward_with_other_techniques(context, modules, offloaded):
    cfg, gradients = tiny_cfg(), []
    cfg.MEMFIT.CHECKPOINT.MODULES, cfg.MEMFIT.OFFLOAD.MODULES = modules, offloaded
    for cfg.MEMFIT.MASKS.PACKED in (False, True):
        model = apply_techniques("model", ComparesAllPixels(), cfg)
        with context():
            model([masks((300, 300))]).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_writing_into_them_is_an_error():
    packed = pack_masks(masks())
    with pytest.raises(RuntimeError, match="writes into packed masks"):
        packed[0] = True
    with pytest.raises(RuntimeError, match="writes into packed masks"):
        packed.logical_not_()


@pytest.mark.parametrize("family", ["mask2former", "rf_detr", "rt_detr_v2"])
def test_models_of_transformers_have_the_same_gradients(family):
    pytest.importorskip("transformers")
    from tiny_transformers import tiny_transformers_cfg

    cfg = tiny_transformers_cfg(family, has_masks=family != "rt_detr_v2")
    batch = [image(i, size=128, num_instances=n) for i, n in enumerate((30, 7))]
    gradients = []
    for cfg.MEMFIT.MASKS.PACKED in (False, True):
        model = apply_techniques("model", tiny_model(cfg), cfg)
        seed_all()
        with EventStorage():
            sum(model(batch).values()).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradients.append(found)
    assert relative_difference(*gradients) < 1e-5
