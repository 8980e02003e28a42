# Copyright (c) the d2_memfit developers.
"""Whether images one by one have the gradient of one forward over all of them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks

from ..counts import Collective, PretendedRanks
from ..engine.losses import (
    CLOSE,
    EXACT,
    NOT_KNOWN,
    OTHER,
    Rules,
    Subject,
    Term,
    adapt_criteria,
    gradient_test,
)
from ..engine.window import images_of
from .patient import Patient, Untested, Unwell

__all__ = ["accumulates", "five_images"]

_WORDS = (OTHER, NOT_KNOWN, CLOSE, EXACT)
_OBJECTS = (10, 3, 1, 0, 5)  # of the images
_MOST_LOSSES = 6  # in the line


def accumulates(patient: Patient) -> str:
    """Compare the gradient of single images with that of one forward over them."""
    images = five_images(patient.batch())
    if not isinstance(images, list):
        raise Untested("not tested: batches cannot be cut into images")
    rules, by_images = patient.call(_decided, patient, images, "window")
    exact, _ = patient.call(_decided, patient, images, "exact")
    zero = [k for k in rules.terms if k in rules.zero and rules.terms[k].word == EXACT]
    tested = {name: term for name, term in rules.terms.items() if name not in zero}
    text = f"gradients of single images and of one forward over them are {_words(tested)}"
    others = {"off": by_images, "exact": exact}
    worse = [f"{_worst(other)} with POLICY {policy}" for policy, other in others.items()]
    text += f". The largest distance is {_worst(rules)}, {', '.join(worse)}"
    if rules.left_out:
        text += f". Tested with {rules.left_out}"
    if zero:
        text += f". Not tested, because they are zero: {', '.join(zero)}"
    if rules.not_finite:
        text += f". Not finite for an image without labels: {', '.join(sorted(rules.not_finite))}"
    of_words = {word: [t for t in rules.terms.values() if t.word == word] for word in _WORDS}
    if of_words[OTHER]:
        raise Unwell(f"{text}. {'; '.join(dict.fromkeys(t.why for t in of_words[OTHER]))}")
    if of_words[NOT_KNOWN]:
        raise Untested(f"{text} ({'; '.join(dict.fromkeys(t.why for t in of_words[NOT_KNOWN]))})")
    stated = dict.fromkeys(t.why for t in of_words[CLOSE])
    return f"{text}. ACCUMULATION.md states {'; '.join(stated)}" if stated else text


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


def _decided(patient: Patient, images: Sequence[Any], policy: str) -> tuple[Rules, Rules]:
    """The rules with a policy, and what holds if all losses count by images."""
    model = patient.model()
    adapt_criteria(model, is_exact=policy == "exact")
    test = gradient_test(Subject(model, patient.losses, _refuse, PretendedRanks()), images)
    return test.rules(test.nearest), test.rules(test.ways[0])


def _refuse(call: Collective) -> bool:
    raise NotImplementedError(str(call))


def _words(of_losses: Mapping[str, Term]) -> str:
    """The losses by their words, those that are furthest away first."""
    parts = []
    for word in _WORDS:
        terms = {name: term for name, term in of_losses.items() if term.word == word}
        names = sorted(terms, key=lambda name: -terms[name].distance)
        far = [f"{name} {terms[name].distance:.1g}" for name in names[:_MOST_LOSSES]]
        more = f" and {len(names) - _MOST_LOSSES} more" if len(names) > _MOST_LOSSES else ""
        if names:
            parts.append(
                f"{word}: {', '.join(names[:_MOST_LOSSES] if word == EXACT else far)}{more}"
            )
    return "; ".join(parts)


def _worst(rules: Rules) -> str:
    name, term = max(rules.terms.items(), key=lambda item: item[1].distance)
    return f"{name} {term.distance:.1g}"
