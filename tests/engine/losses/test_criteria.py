# Copyright (c) the d2_memfit developers.
"""Each loss of ``criteria_list.py``: right, or named by a warning, and every remedy helps.

The gradient of each window is compared with that of one forward over all its images, computed here
from a fresh copy of the model with the state that it had as the window began.

    python tests/engine/losses/test_criteria.py [NAME...]    prints the distances and warnings
"""

import copy
import logging
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from d2_memfit import AccumulatingTrainer, compat

schedule = None
from d2_memfit.settings import NormalizerOptions
from tests.engine.losses.criteria_list import (
    CRITERIA,
    OBJECTS,
    WINDOWS,
    annotated_images,
    copied_state,
    find,
)

pytestmark = pytest.mark.slow

LIMIT = 1e-3
REPEATS = 60  # of windows with random numbers
NOISES = 3  # standard errors


@dataclass
class Outcome:
    """Result of six windows.

    Attributes:
        distances: for each term, the largest relative distance of a window's gradient, over the
            parameters that only this term has; over all parameters under "total".
        noise: the standard error of each distance; 0 without random numbers.
        early, late: warnings of the first window, and of those after it.
        infos: all lines.
        error: the end of the run, if it ended.
    """

    distances: dict = field(default_factory=dict)
    noise: dict = field(default_factory=dict)
    early: list = field(default_factory=list)
    late: list = field(default_factory=list)
    infos: list = field(default_factory=list)
    error: str = ""

    def see(self, distances, noise=0.0):
        for name, distance in distances.items():
            if distance >= self.distances.get(name, -1.0):
                self.distances[name] = distance
                self.noise[name] = noise

    @property
    def wrong(self):
        return [n for n, d in self.distances.items() if d > max(LIMIT, NOISES * self.noise[n])]


class Lines(logging.Handler):
    def __init__(self, outcome):
        super().__init__(logging.INFO)
        self.outcome, self.is_early = outcome, True

    def emit(self, record):
        text = record.getMessage()
        self.outcome.infos.append(text)
        if record.levelno >= logging.WARNING:
            (self.outcome.early if self.is_early else self.outcome.late).append(text)


class Caught:
    """Catches a window's gradient before the step, and makes the step a small one."""

    def __init__(self, model):
        self.model, self.gradient = model, {}

    def __call__(self, parameters):
        self.gradient = gradient_of(self.model)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def gradient_of(model):
    """The gradient of each parameter."""
    named = model.named_parameters()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def made(criterion, seed=0):
    torch.manual_seed(seed)
    return criterion.kind().double().train()


def full_gradient(criterion, model, images):
    """Gradient of one forward, and the names of the parameters that only one term has."""
    twin = made(criterion)
    copied_state(model, twin)
    losses = twin(copy.deepcopy(images))
    named = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    users = {name: set() for name in losses}
    for name, loss in losses.items():
        found = torch.autograd.grad(loss, named.values(), retain_graph=True, allow_unused=True)
        users[name] = {n for n, g in zip(named, found) if g is not None}
    sum(losses.values()).backward()
    gradient = gradient_of(twin)
    if comm.get_world_size() > 1:
        for of_parameter in gradient.values():
            dist.all_reduce(of_parameter)
        gradient = {name: g / comm.get_world_size() for name, g in gradient.items()}
        all_users = comm.all_gather(users)
        users = {n: set().union(*(u.get(n, set()) for u in all_users)) for n in union(all_users)}
    own = {}
    for name, used in users.items():
        others = set().union(*(u for n, u in users.items() if n != name))
        own[name] = used - others or used
    own["total"] = set(named)
    return gradient, own


def union(dicts: Iterable[dict]):
    return dict.fromkeys(name for one in dicts for name in one)


def flat(gradient, names):
    parts = [gradient[name].flatten() for name in gradient if name in names]
    return torch.cat(parts) if parts else torch.zeros(1)


def distances(actual, full, own):
    """The relative distance of each term. A term without a gradient is compared with all terms."""
    least = 1e-3 * float(flat(full, own["total"]).norm())
    found = {}
    for name, names in own.items():
        wanted = flat(full, names)
        off = float((flat(actual, names) - wanted).norm())
        found[name] = off / max(float(wanted.norm()), least, 1e-12)
    return found


def batches_of(images):
    """What a window may be compared with: on several ranks also the images of all of them.

    Detectron2 takes the mean of each rank's own means. One forward over all images has another one.
    """
    everywhere = [image for of_rank in comm.all_gather(images) for image in of_rank]
    return [images, everywhere] if comm.get_world_size() > 1 else [images]


def infinite_terms(model, images, size):
    """Terms that are not numbers in a micro-batch."""
    found = set()
    for first in range(0, len(images), size):
        losses = copy.deepcopy(model)(copy.deepcopy(images[first : first + size]))
        found |= {name for name, loss in losses.items() if not loss.isfinite()}
    return dict.fromkeys(found, float("inf"))


def tried(criterion, size, windows=WINDOWS):
    """Train on windows, and compare each with one forward."""
    outcome = Outcome()
    lines = Lines(outcome)
    logger = logging.getLogger("d2_memfit")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        with EventStorage() as storage:
            run = run_random if criterion.is_random else run_windows
            run(criterion, size, windows, outcome, lines, storage)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    return outcome


def trainer_of(criterion, model, size, loader, lr):
    caught = Caught(model)
    wrapped = model
    if comm.get_world_size() > 1:
        wrapped = compat.create_ddp_model(model, broadcast_buffers=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = AccumulatingTrainer(
        wrapped,
        loader,
        torch.optim.SGD(trained, lr=lr),
        micro_batch_size=size,
        normalizers=NormalizerOptions(**criterion.options),
        clip_gradients=caught,
    )
    return trainer, caught


def run_windows(criterion, size, windows, outcome, lines, storage):
    model = made(criterion)
    trainer, caught = trainer_of(criterion, model, size, windows, lr=0.01)
    for storage.iter in range(len(windows)):
        images = windows[storage.iter]
        references = [full_gradient(criterion, model, batch) for batch in batches_of(images)]
        try:
            trainer.run_step()
        except FloatingPointError as e:
            outcome.error = str(e)
            outcome.see(infinite_terms(model, images, size))
            return
        found = [distances(caught.gradient, *reference) for reference in references]
        outcome.see({name: min(f[name] for f in found) for name in found[0]})
        lines.is_early = False


def run_random(criterion, size, windows, outcome, lines, storage):
    """Compare means over many random numbers, for the first two windows."""
    model = made(criterion)
    chosen = [window for window in windows[:2] for _ in range(REPEATS)]
    trainer, caught = trainer_of(criterion, model, size, chosen, lr=0.0)
    cut, full = [], []
    for storage.iter in range(len(chosen)):
        images = chosen[storage.iter]
        trainer.run_step()
        lines.is_early = False
        cut.append(caught.gradient)
    for images in windows[:2]:
        for seed in range(REPEATS):
            torch.manual_seed(1000 + seed)
            full.append(gradient_with(criterion, model, images, seed))
    for first in range(0, len(chosen), REPEATS):
        ones, others = cut[first : first + REPEATS], full[first : first + REPEATS]
        own = others[0][1]
        for name, names in own.items():
            a = torch.stack([flat(one, names) for one in ones])
            b = torch.stack([flat(other[0], names) for other in others])
            scale = max(float(b.mean(0).norm()), 1e-12)
            noise = ((a.var(0) + b.var(0)) / REPEATS).sum().sqrt()
            off = (a.mean(0) - b.mean(0)).norm()
            outcome.see({name: float(off) / scale}, float(noise) / scale)


def gradient_with(criterion, model, images, seed):
    """Gradient of one forward with the random numbers of a seed."""
    twin = made(criterion)
    copied_state(model, twin)
    torch.manual_seed(1000 + seed)
    losses = twin(copy.deepcopy(images))
    sum(losses.values()).backward()
    return gradient_of(twin), full_gradient(criterion, model, images)[1] if seed == 0 else None


def is_named(word, lines):
    return any(re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", line) for line in lines)


def complaints(criterion, outcome):
    """What is wrong with the warnings of a run."""
    found = []
    words = [*outcome.distances, *criterion.names]
    wrong = [name for name in outcome.wrong if name != "total"]
    said = outcome.infos if criterion.is_published else outcome.early
    if not wrong and "total" in outcome.wrong:
        wrong = [[n for n in outcome.distances if n != "total"]]
    for name in wrong:
        terms = name if isinstance(name, list) else [name]
        if not any(is_named(word, said) for word in [*terms, *criterion.names]):
            far = max(outcome.distances[n] for n in terms)
            found.append(f"{' '.join(terms)} is {far:.2g} off, and no warning says so")
    is_right = not outcome.wrong
    for word in words:
        lines = [*outcome.early, *outcome.late]
        lines = [n for n in lines if "not finite for an image without labels" not in n]
        if criterion.is_random:  # that its noise hides it may be said
            lines = [line for line in lines if "not known" not in line]
        is_term_right = outcome.distances.get(word, 1.0) <= LIMIT or is_right
        is_of_state = word in criterion.names and not is_right
        if is_term_right and not is_of_state and is_named(word, lines):
            far = outcome.distances.get(word, 0.0)
            found.append(f"{word} is {far:.2g} off, and a warning names it: {lines}")
    return found


# fmt: off
IN_ALL_WAYS = {
    "NumBoxesOverRanks", "WindowCount", "OwnCount", "ClampWithinAllReduce", "PlainSum", "Fcos",
    "DistinctClassesOverRanks", "RunningMean", "Solo", "LabelledPixels", "HardPixelsOfBatch",
    "ClassCountsOverRanks", "PairsOfBatch", "NormalisedGradients", "Queue", "Teacher",
    "BatchStatistics", "TimesRanks", "SmallDetector", "Dropout", "RandomNegatives",
}
# fmt: on


def marks(name, size=None):
    """Micro-batches of one image try each criterion that draws no random numbers. Larger ones,
    remedies and ranks are tried with some of them; the others are long.
    """
    is_quick = size == 1 and not CRITERIA[name].is_random
    return () if is_quick or name in IN_ALL_WAYS else pytest.mark.long


ALL = [
    pytest.param(name, size, id=f"{name}-{size}", marks=marks(name, size))
    for name in CRITERIA
    for size in (1, 3)
]
REMEDIES = [
    pytest.param(name, remedy, size, id=f"{name}-{remedy}-{size}", marks=marks(name))
    for name, criterion in CRITERIA.items()
    for remedy in criterion.remedies
    for size in (1, 3)
]


@pytest.mark.parametrize(("name", "size"), ALL)
def test_what_is_wrong_is_named_and_what_is_right_is_not(name, size):
    criterion = CRITERIA[name]
    assert not complaints(criterion, tried(criterion, size))


@pytest.mark.parametrize(("name", "remedy", "size"), REMEDIES)
def test_every_remedy_helps(name, remedy, size):
    criterion = find(name, remedy)
    outcome = tried(criterion, size)
    assert not outcome.wrong, outcome.distances
    assert not complaints(criterion, outcome)


@pytest.mark.parametrize("size", [1, 3])
def test_a_count_of_pixels_is_not_taken_for_one_of_objects(size, monkeypatch):
    """In the test with the third window, labelled pixels happen to follow from the objects."""
    monkeypatch.setattr(schedule, "_AGAIN_AT", (3,))
    outcome = tried(find("LabelledPixels", "LabelledPixelsDeclared"), size)
    assert not outcome.wrong, outcome.distances
    assert not outcome.late


def on_ranks(rank, name, remedy, size):
    """Outcome of a rank with its own images, as many as on the other ranks."""
    windows = WINDOWS
    if rank > 0:
        windows = [annotated_images(n[::-1], 50 + seed) for seed, n in enumerate(OBJECTS)]
    return tried(find(name, remedy), size, windows)


def of_ranks(ranks, name, remedy, size):
    first, *others = ranks.run(on_ranks, name, remedy, size)
    for other in others:
        first.early += other.early
        first.late += other.late
        first.infos += other.infos
    return first


NOT_RANDOM = [name for name, criterion in CRITERIA.items() if not criterion.is_random]


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in NOT_RANDOM])
def test_two_ranks(name, two_ranks):
    criterion = CRITERIA[name]
    assert not complaints(criterion, of_ranks(two_ranks, name, None, 1))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [pytest.param(n, r, marks=marks(n)) for n in NOT_RANDOM for r in CRITERIA[n].remedies],
)
def test_every_remedy_helps_on_two_ranks(name, remedy, two_ranks):
    criterion = find(name, remedy)
    outcome = of_ranks(two_ranks, name, remedy, 3)
    assert not outcome.wrong, outcome.distances
    assert not complaints(criterion, outcome)


def main(names):
    """Print the distances and warnings of criteria, with those of their remedies."""
    for name in names or CRITERIA:
        for remedy in (None, *CRITERIA[name].remedies):
            criterion = find(name, remedy)
            for size in (1, 3):
                outcome = tried(criterion, size)
                far = {n: f"{d:.1e}" for n, d in outcome.distances.items()}
                noise = {n: f"{d:.1e}" for n, d in outcome.noise.items() if d}
                print(f"{name} {remedy or ''} {size}: {far} {noise or ''} {outcome.error[:60]}")
                for line in complaints(criterion, outcome):
                    print("   !", line[:300])


if __name__ == "__main__":
    main(sys.argv[1:])
