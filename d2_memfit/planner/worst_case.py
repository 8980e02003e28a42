"""The batch that needs the most memory of all that a config can produce."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.file_io import PathManager
from torch import nn

from ..errors import ConfigError
from ..techniques.modules import replaced_functions, source_files

__all__ = [
    "WorstCase",
    "evaluation_batch",
    "tensors_of",
    "training_batch",
    "worst_case",
    "worst_detections",
    "worst_proposals",
]

# Where no dataset is there to count them: the most crowded image of COCO's training set has 93.
_DEFAULT_INSTANCES = 100

# Detectron2's models that take no labels of pixels; users' own may take them.
_WITHOUT_SEM_SEG = ("GeneralizedRCNN", "ProposalNetwork", "RetinaNet")

Size = tuple[int, int]  # height and width in pixels


@dataclass(frozen=True)
class WorstCase:
    """What the largest batch is made of.

    Attributes:
        image_sizes: heights and widths in pixels of a batch's images, in turn; Detectron2 pads all
            to the largest height and width.
        num_instances: annotated objects in each image.
        test_size: that of the largest image in evaluation.
        original_size: to which its results are brought, masks included.
        assumptions: what is not known, and what is taken instead; a line each.
        size_alone: of the image of a batch of one; None is the first of ``image_sizes``.
    """

    image_sizes: tuple[Size, ...]
    num_instances: int
    test_size: Size
    original_size: Size
    assumptions: tuple[str, ...] = ()
    size_alone: Optional[Size] = None


def worst_case(cfg: CfgNode, num_gpus: int = 1) -> WorstCase:
    """Find it from INPUT, DATALOADER, and the datasets where they are registered and present.

    Of augmentations it knows those that Detectron2's ``DatasetMapper`` makes of a config.

    Raises:
        ConfigError: images keep their size, and no dataset says how large they are.
    """
    assumptions = []
    train, test = _facts(cfg.DATASETS.TRAIN), _facts(cfg.DATASETS.TEST)
    if train is None:
        assumptions.append(
            f"DATASETS.TRAIN {tuple(cfg.DATASETS.TRAIN)} cannot be read: images of any shape, with "
            f"{_DEFAULT_INSTANCES} instances each"
        )
    if test is None:
        assumptions.append(
            f"DATASETS.TEST {tuple(cfg.DATASETS.TEST)} cannot be read: images of "
            "any shape, whose results stay at the size of the network's input"
        )
    short, long = max(cfg.INPUT.MIN_SIZE_TRAIN), cfg.INPUT.MAX_SIZE_TRAIN
    if train is not None:
        groups = _orientations(train.sizes)
        crops = [{crop for size in group for crop in _crops(cfg, size)} for group in groups]
        groups = [{_resized(size, short, long) for size in group} for group in crops]
    elif cfg.INPUT.CROP.ENABLED and cfg.INPUT.CROP.TYPE.startswith("absolute"):
        groups = [{_resized(crop, short, long) for crop in _crops(cfg, (10**6, 10**6))}]
    else:
        groups = _orientations(_any_shape("INPUT.MIN_SIZE_TRAIN", short, long))
    if _orientations_meet(cfg, num_gpus):
        groups = [set().union(*groups)]
    meeting = max(map(_highest_and_widest, groups), key=_padded_area_of_all)
    short, long = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    if test:
        test_sizes = {_resized(size, short, long) for size in test.sizes}
    else:
        test_sizes = _any_shape("INPUT.MIN_SIZE_TEST", short, long)
    test_size = max(test_sizes, key=_padded_area)
    return WorstCase(
        meeting,
        train.num_instances if train else _DEFAULT_INSTANCES,
        test_size,
        max(test.sizes, key=math.prod) if test else test_size,
        tuple(assumptions),
        size_alone=max(set().union(*groups), key=_padded_area),
    )


def _orientations(sizes: Iterable[Size]) -> list[set[Size]]:
    """The groups of DATALOADER.ASPECT_RATIO_GROUPING, as far as there are any in them."""
    sizes = set(sizes)
    wide = {size for size in sizes if size[1] > size[0]}
    return [group for group in (wide, sizes - wide) if group]


def _orientations_meet(cfg: CfgNode, num_gpus: int) -> bool:
    """Whether portraits and landscapes can be in one micro-batch: without grouping, or where one is
    of images of several batches.
    """
    if not cfg.DATALOADER.ASPECT_RATIO_GROUPING:
        return True
    batch, micro_batch = cfg.SOLVER.IMS_PER_BATCH // num_gpus, cfg.MEMFIT.MICRO_BATCH
    return cfg.SOLVER.ACCUMULATION_STEPS > 1 and bool(micro_batch) and batch % micro_batch > 0


def _highest_and_widest(sizes: set[Size]) -> tuple[Size, ...]:
    """Two images that are padded most if they meet; or one, if it is both."""
    highest, widest = max(sizes), max(sizes, key=lambda size: size[::-1])
    return (highest,) if highest == widest else (highest, widest)


@dataclass(frozen=True)
class _Facts:
    sizes: frozenset[Size]
    num_instances: int  # in the most crowded image


def _facts(names: Sequence[str]) -> Optional[_Facts]:
    """None where one of the datasets is not there, or does not say how large its images are."""
    for name in names:
        if name not in DatasetCatalog:
            return None
        json_file = MetadataCatalog.get(name).get("json_file")
        if json_file and not PathManager.isfile(json_file):
            return None
    return _facts_of(tuple((name, DatasetCatalog[name]) for name in names))


@lru_cache(maxsize=8)  # of names, and of what is registered under them now
def _facts_of(datasets: tuple[tuple[str, Callable], ...]) -> Optional[_Facts]:
    sizes, num_instances = set(), 0
    for name, _ in datasets:
        try:
            dicts = DatasetCatalog.get(name)
        except (OSError, ImportError):  # built-in ones whose files or packages are missing
            return None
        for d in dicts:
            if "height" not in d or "width" not in d:
                return None
            sizes.add((d["height"], d["width"]))
            objects = [a for a in d.get("annotations", []) if not a.get("iscrowd", 0)]
            num_instances = max(num_instances, len(objects))
    return _Facts(frozenset(sizes), max(num_instances, 1)) if sizes else None


def _crops(cfg: CfgNode, size: Size) -> list[Size]:
    """The most different shapes that INPUT.CROP makes of an image; resizing comes after it."""
    if not cfg.INPUT.CROP.ENABLED:
        return [size]
    (height, width), (first, second) = size, cfg.INPUT.CROP.SIZE
    if cfg.INPUT.CROP.TYPE == "absolute":
        return [(min(height, first), min(width, second))]
    if cfg.INPUT.CROP.TYPE == "absolute_range":
        heights, widths = ({min(x, first), min(x, second)} for x in size)
    elif cfg.INPUT.CROP.TYPE == "relative":
        return [(int(height * first + 0.5), int(width * second + 0.5))]
    else:
        heights, widths = {int(height * first + 0.5), height}, {int(width * second + 0.5), width}
    return [(h, w) for h in heights for w in widths]


def _resized(size: Size, short: int, long: int) -> Size:
    if short == 0:
        return size
    return ResizeShortestEdge.get_output_shape(*size, short, long)


def _any_shape(key: str, short: int, long: int) -> set[Size]:
    if short == 0:
        raise ConfigError(
            f"{key} 0 leaves images in their own sizes, and the dataset that would say what they "
            "are cannot be read"
        )
    short = min(short, long)
    return {(short, long), (long, short)}


def _padded_area(size: Size) -> int:
    return math.prod(-(-length // 32) * 32 for length in size)


def _padded_area_of_all(sizes: tuple[Size, ...]) -> int:
    return _padded_area((max(s[0] for s in sizes), max(s[1] for s in sizes)))


def training_batch(cfg: CfgNode, case: WorstCase, num_images: int) -> list[dict[str, Any]]:
    """Dataset dicts of Detectron2's format, with all that its models ask of one."""
    sizes = [case.image_sizes[i % len(case.image_sizes)] for i in range(num_images)]
    if num_images == 1 and case.size_alone is not None:
        sizes = [case.size_alone]
    topk = cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN
    return [_image(cfg, size, case.num_instances, i, topk) for i, size in enumerate(sizes)]


def evaluation_batch(cfg: CfgNode, case: WorstCase) -> list[dict[str, Any]]:
    image = _image(cfg, case.test_size, 0, 0, cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST)
    image["height"], image["width"] = case.original_size
    return [image]


def tensors_of(batch: list[dict[str, Any]]) -> list[torch.Tensor]:
    """All that goes to the device with a batch."""
    values = [value for image in batch for value in image.values()]
    for instances in [v for v in values if isinstance(v, Instances)]:
        values += instances.get_fields().values()
    values = [getattr(value, "tensor", value) for value in values]  # of boxes, masks, keypoints
    return [value for value in values if isinstance(value, torch.Tensor)]


def _image(
    cfg: CfgNode, size: Size, num_instances: int, index: int, num_proposals: int
) -> dict[str, Any]:
    height, width = size
    boxes = _boxes(num_instances, size, seed=0)  # the same in all, for labels to be found once
    image: dict[str, Any] = {
        "image": torch.empty(3, height, width, dtype=torch.uint8),
        "height": height,
        "width": width,
        "file_name": f"worst_case_{index}",
        "image_id": index,
    }
    instances = Instances(size)
    instances.gt_boxes = Boxes(boxes)
    instances.gt_classes = torch.zeros(num_instances, dtype=torch.int64)
    if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask":
        instances.gt_masks = BitMasks(torch.empty(num_instances, height, width, dtype=torch.bool))
    elif cfg.MODEL.MASK_ON:
        corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].double().numpy()
        instances.gt_masks = PolygonMasks([[polygon] for polygon in corners])
    if cfg.MODEL.KEYPOINT_ON:
        keypoints = torch.full((num_instances, cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, 3), 2.0)
        keypoints[..., :2] = Boxes(boxes).get_centers()[:, None]
        instances.gt_keypoints = Keypoints(keypoints)
    if cfg.MODEL.META_ARCHITECTURE not in _WITHOUT_SEM_SEG:
        image["sem_seg"] = torch.zeros(height, width, dtype=torch.int64)
    if cfg.MODEL.LOAD_PROPOSALS:
        image["proposals"] = _proposals(boxes, size, num_proposals)
    if num_instances:
        image["instances"] = instances
    return image


def _boxes(num: int, size: Size, seed: int) -> torch.Tensor:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    generator = torch.Generator().manual_seed(seed)
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    corner, length = torch.rand(2, num, 2, generator=generator)
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return torch.cat([corner, corner + length], dim=1)


def _proposals(boxes: torch.Tensor, size: Size, num: int) -> Instances:
    """Half of them lie on the objects, so that they fill the quota of foreground."""
    foreground = boxes.repeat(num // max(len(boxes), 1), 1)[: num // 2]
    background = _boxes(num - len(foreground), size, seed=1)
    proposals = Instances(size)
    proposals.proposal_boxes = Boxes(torch.cat([foreground, background]))
    proposals.objectness_logits = torch.zeros(num)
    return proposals


@contextmanager
def worst_proposals(model: nn.Module, cfg: CfgNode, batch: list[dict[str, Any]]) -> Iterator[None]:
    """While open, the proposal network of a model with ROI heads finds as many proposals as the
    config allows, and half of them on objects.
    """
    generator = getattr(model, "proposal_generator", None)
    if generator is None or not hasattr(model, "roi_heads"):
        yield
        return

    def replace(module: nn.Module, args: tuple, output: tuple) -> tuple:
        rpn = cfg.MODEL.RPN
        num = rpn.POST_NMS_TOPK_TRAIN if module.training else rpn.POST_NMS_TOPK_TEST
        proposals = []
        for image in batch:
            size = tuple(image["image"].shape[1:])
            instances = image.get("instances", Instances(size, gt_boxes=Boxes(torch.empty(0, 4))))
            found = _proposals(instances.gt_boxes.tensor, size, num)
            proposals.append(found.to(output[0][0].proposal_boxes.device))
        return proposals, output[1]

    hook = generator.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def worst_detections(model: nn.Module) -> Iterator[None]:
    """While open, ROI heads detect as many objects as they may, each as large as the image."""
    files = source_files(model.modules())
    with replaced_functions(files, {"fast_rcnn_inference": lambda _: _most_detections}):
        yield


def _most_detections(
    boxes: tuple,
    scores: tuple,
    image_shapes: list,
    score_thresh: float,
    nms_thresh: float,
    topk: int,
) -> tuple[list[Instances], list[torch.Tensor]]:
    """In place of Detectron2's ``fast_rcnn_inference``."""
    results, kept = [], []
    for scores_of_image, size in zip(scores, image_shapes):
        num = min(topk, len(scores_of_image))
        result = Instances(size)
        whole = scores_of_image.new_tensor([0.0, 0.0, size[1], size[0]])
        result.pred_boxes = Boxes(whole.repeat(num, 1))
        result.scores = scores_of_image[:num, 0]
        result.pred_classes = torch.zeros(num, dtype=torch.int64, device=whole.device)
        results.append(result)
        kept.append(torch.arange(num, device=whole.device))
    return results, kept
