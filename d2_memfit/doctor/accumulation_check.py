# Copyright (c) the d2_memfit developers.
"""Whether images one by one have the losses of one forward over all of them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks

from ..compat.pytorch import BatchNorm
from ..counts import Collective, PretendedRanks
from ..engine.normalizers import RIGHT, Trial, Verdict, adapt_criteria, judged, published_distance
from ..engine.window import images_of
from .patient import Patient, Unwell

__all__ = ["accumulates", "five_images"]

_OBJECTS = (10, 3, 1, 0, 5)  # of the images
_MOST_LOSSES = 6  # in the line
_POLICIES = ("window", "exact")


def accumulates(patient: Patient) -> str:
    """Compare five images one by one with all at once, loss by loss, with each policy."""
    images = five_images(patient.batch())
    without = ""
    try:
        verdicts = {p: patient.call(_verdict, patient, images, p) for p in _POLICIES}
    except Exception as e:  # some models cannot train on an image without objects
        without = f" (the model raises {type(e).__name__} for an image without objects)"
        images = five_images(patient.batch(), with_empty=False)
        verdicts = {p: patient.call(_verdict, patient, images, p) for p in _POLICIES}
    model, distances = patient.model(), verdicts["window"].distances
    which = f"{len(images)} images{without}, one by one against one forward"
    text = f"losses of {which}, {_table(verdicts)}"
    off = [name for name, distance in distances.items() if distance > RIGHT]
    published = {name: published_distance(model, name) for name in off}
    unknown = [name for name in off if distances[name] > published[name].distance]
    if unknown:
        raise Unwell(
            f"{text}. {', '.join(unknown)}: divided by a count of its own batch that is not "
            "declared, or its images depend on each other. See ACCUMULATION.md"
        )
    if any(isinstance(m, BatchNorm) and m.training for m in model.modules()):
        live = patient.call(_verdict, patient, images, "window", False).distances
        allowed = {name: max(RIGHT, 2 * distances[name]) for name in live}
        worst = max(live, key=lambda name: live[name] / allowed[name])
        if live[worst] > allowed[worst]:
            raise Unwell(
                f"{text}. With the statistics of each micro-batch, batch normalisation makes "
                f"{worst} {live[worst]:.0e} from one forward's. Use MODEL.*.NORM FrozenBN or GN"
            )
    if not off:
        return text
    stated = [f"{name} up to {p.distance:g} ({p.kind})" for name, p in published.items()]
    return f"{text}. ACCUMULATION.md states {', '.join(stated)}"


def five_images(batch: Any, with_empty: bool = True) -> Any:
    """Images with other pixels, and with 10, 3, 1, 0 and 5 objects of the most crowded one.

    If it has fewer objects, they come again in other places. Batches in columns have their own.

    Args:
        with_empty: whether there is the image without objects.
    """
    if not isinstance(batch, list) or not isinstance(batch[0], dict):
        return images_of(batch) or batch
    crowded = max(batch, key=lambda image: len(image.get("instances", ())))
    images = []
    for i, num in enumerate(_OBJECTS):
        if not num and not with_empty:
            continue
        image = copy.deepcopy(crowded)
        pixels = image.get("image")
        if isinstance(pixels, torch.Tensor):
            generator = torch.Generator().manual_seed(i)
            image["image"] = torch.randint(0, 256, pixels.shape, generator=generator).to(pixels)
        instances = image.get("instances")
        if isinstance(instances, Instances) and len(instances):
            image["instances"] = _some(instances, num)
        images.append(image)
    return images


def _some(instances: Instances, number: int) -> Instances:
    rounds = -(-number // len(instances))
    if rounds < 2:
        return instances[:number]
    try:
        return Instances.cat([_moved(instances, 7 * n) for n in range(rounds)])[:number]
    except (TypeError, ValueError):  # a field of the project's own
        return instances[torch.arange(number) % len(instances)]


def _moved(instances: Instances, pixels: int) -> Instances:
    """The instances, to the right and down by some pixels."""
    moved = copy.deepcopy(instances)
    for value in moved.get_fields().values():
        if isinstance(value, Boxes):
            value.tensor.add_(pixels)
        elif isinstance(value, PolygonMasks):
            value.polygons = [[p + pixels for p in polygons] for polygons in value.polygons]
        elif isinstance(value, Keypoints):
            value.tensor[..., :2] += pixels
        else:
            masks = getattr(value, "tensor", value)
            if isinstance(masks, torch.Tensor) and masks.shape[-2:] == moved.image_size:
                masks.copy_(masks.roll((pixels, pixels), (-2, -1)))
    return moved


def _verdict(patient: Patient, images: Sequence[Any], policy: str, freezes: bool = True) -> Verdict:
    """The verdict on each image as a part: the nearer of two ways to fix random numbers."""
    verdicts = []
    for same_rows in (True, False):
        model = patient.model()
        adapt_criteria(model, is_exact=policy == "exact")
        ranks = PretendedRanks()
        trial = Trial(model, patient.losses, _refuse, ranks, freezes=freezes, same_rows=same_rows)
        verdicts.append(judged([trial.run(images)]))
        if max(verdicts[-1].distances.values()) <= RIGHT:
            break
    return min(verdicts, key=lambda v: sum(v.distances.values()))


def _refuse(call: Collective) -> bool:
    raise NotImplementedError(str(call))


def _table(verdicts: Mapping[str, Verdict]) -> str:
    """The distances of the losses that are furthest away, with each policy."""
    policies = {"off": verdicts["window"].by_images}
    policies.update((policy, verdict.distances) for policy, verdict in verdicts.items())
    names = sorted(policies["off"], key=lambda n: [-policies[p][n] for p in ("window", "off")])
    parts = [
        f"{name} {', '.join(f'{distances[name]:.0e}' for distances in policies.values())}"
        for name in names[:_MOST_LOSSES]
    ]
    more = f"; {len(names) - _MOST_LOSSES} more are nearer" if len(names) > _MOST_LOSSES else ""
    return f"with POLICY {', '.join(policies)}: {'; '.join(parts)}{more}"
