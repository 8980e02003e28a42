# Copyright (c) the d2_memfit developers.
"""The images that are foreseen, against those that loaders give."""

from itertools import islice

import numpy as np
import pytest
import torch
from detectron2.data import build_detection_train_loader
from detectron2.data import transforms as T
from detectron2.data.samplers import RepeatFactorTrainingSampler, TrainingSampler

from d2_memfit.certificate.drawn_sizes import DrawnSizes, UnknownDraws
from d2_memfit.certificate.foreseen_images import ForeseenImages
from d2_memfit.engine.resuming import ResumableBatches
from d2_memfit.errors import ConfigError
from d2_memfit.iteration import BatchGeometry

WINDOWS = 4
BOUND = (90, 130)
SIZES = [(48, 64), (80, 40), (64, 64), (50, 70)]
DICTS = [
    {
        "image_id": i,
        "file_name": f"{i}.png",
        "height": SIZES[i % 4][0],
        "width": SIZES[i % 4][1],
        "annotations": [{"iscrowd": 0}] * (i % 5) + [{"iscrowd": 1}],
    }
    for i in range(23)
]
RESIZE = T.ResizeShortestEdge((20, 30, 40), 70, "choice")


class ResizeOfProject(T.ResizeShortestEdge):
    def get_transform(self, image):
        return RESIZE.get_transform(image) if np.random.random() < 0.5 else T.NoOpTransform()


AUGMENTATIONS = {
    "choice": [RESIZE, T.RandomFlip()],
    "range": [T.ResizeShortestEdge((20, 40), 70, "range")],
    "not always": [T.ResizeShortestEdge((0, 30), 70, "choice"), T.RandomFlip(0.2)],
    "of a project": [ResizeOfProject(10)],
    "crop": [T.RandomCrop("relative_range", (0.3, 0.5)), RESIZE],
    "large scale jitter": [T.ResizeScale(0.1, 2.0, 60, 60), T.FixedSizeCrop((50, 60), pad=False)],
    "padded": [T.ResizeScale(0.1, 2.0, 60, 60), T.FixedSizeCrop((50, 60)), T.RandomFlip()],
    "perhaps": [T.RandomApply(RESIZE, 0.5), T.RandomBrightness(0.9, 1.1)],
    "nested": [T.AugmentationList([T.RandomFlip(), T.AugmentationList([RESIZE])]), RESIZE],
}


class Mapper:
    """Maps empty images by Detectron2's augmentations."""

    def __init__(self, augmentations):
        self.augmentations = T.AugmentationList(augmentations)

    def __call__(self, d):
        image = T.AugInput(np.zeros((d["height"], d["width"], 3), np.uint8))
        self.augmentations(image)
        objects = [a for a in d["annotations"] if not a["iscrowd"]]
        return {**d, "image": torch.empty(3, *image.image.shape[:2]), "instances": objects}


class MapperThatDraws(Mapper):
    def __call__(self, d):
        np.random.rand()
        return super().__call__(d)


class MapperThatAdds(Mapper):
    def __call__(self, d):
        return super().__call__({**d, "annotations": [*d["annotations"], {"iscrowd": 0}]})


def batches_of(mapper, rank=0, ranks=1, seed=3, repeats=False, **options):
    torch.manual_seed(seed)
    kind = RepeatFactorTrainingSampler if repeats else TrainingSampler
    sampler = kind(1 + torch.arange(23) / 10 if repeats else 23, seed=seed)
    sampler._rank, sampler._world_size = rank, ranks
    options = {"num_workers": 2, "total_batch_size": 3, **options}
    loader = build_detection_train_loader(DICTS, mapper=mapper, sampler=sampler, **options)
    return ResumableBatches(loader)


def foreseen(mapper, ranks=1, compared=5, **options):
    """The images that are foreseen on each rank, and the state that a run starts from."""
    batches = batches_of(mapper, **options)
    stream, states = batches.first_state(ranks, seed=7)
    images = ForeseenImages(batches, states[0]["workers"][0], compared, BOUND)
    geometry = BatchGeometry(ranks, 3, accumulation_steps=2)
    windows = [
        images.windows(geometry, rank, states[rank]["workers"], WINDOWS) for rank in range(ranks)
    ]
    return images, windows, (stream, states)


def given(mapper, state, rank=0, ranks=1, **options):
    """The images that a loader of a rank gives from a state on."""
    batches = batches_of(mapper, rank, ranks, seed=8, **options)
    assert batches.load_state_dict(*state)
    images = [image for batch in islice(batches, 2 * WINDOWS) for image in batch]
    rows = [(i["image_id"], *i["image"].shape[1:], len(i["instances"])) for i in images]
    return np.array(rows).reshape(WINDOWS, 6, 4)


def check_windows(mapper, ranks=1, **options):
    images, windows, state = foreseen(mapper, ranks, **options)
    assert images.why_bounds == ""
    for rank in range(ranks):
        indices, shapes = windows[rank]
        rows = given(mapper, state, rank, ranks, **options)
        assert np.array_equal(indices, rows[..., 0])
        assert np.array_equal(shapes, rows[..., 1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_sizes_are_those_of_the_loader(name):
    check_windows(Mapper(AUGMENTATIONS[name]), aspect_ratio_grouping=False)


@pytest.mark.slow
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_order_is_that_of_each_rank(ranks, is_grouped):
    check_windows(Mapper(AUGMENTATIONS["choice"]), ranks, aspect_ratio_grouping=is_grouped)


@pytest.mark.parametrize("options", [{"num_workers": 3}, {"repeats": True}])
def test_workers_and_samplers(options):
    check_windows(Mapper(AUGMENTATIONS["choice"]), **options)


def test_a_mapper_with_a_list_of_another_name():
    mapper = Mapper(AUGMENTATIONS["choice"])
    mapper.tfm_gens = mapper.augmentations.augs
    del mapper.augmentations
    assert {DrawnSizes(mapper).draw((40, 40)) for _ in range(20)} == {(20, 20), (30, 30), (40, 40)}


class NeedsPixels(T.Augmentation):
    def get_transform(self, image):
        return T.NoOpTransform() if image.mean() else RESIZE.get_transform(image)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mapper", "why"),
    [
        (MapperThatDraws([RESIZE]), "draws other random numbers"),
        (Mapper([NeedsPixels()]), "NeedsPixels needs more than the size"),
        (Mapper([T.RandomRotation((0, 10))]), "the effect of RotationTransform"),
        (Mapper([RESIZE]).__call__, "no list of augmentations"),
    ],
)
def test_what_cannot_be_drawn_counts_as_the_largest(mapper, why):
    images, [(indices, shapes)], state = foreseen(mapper)
    assert why in images.why_bounds
    rows = given(mapper, state)
    assert np.array_equal(indices, rows[..., 0])
    assert np.array_equal(shapes[..., 2], rows[..., 3])
    assert (shapes[..., :2] == BOUND).all()


def test_unknown_draws_name_the_augmentation():
    with pytest.raises(UnknownDraws, match="RotationTransform"):
        DrawnSizes(Mapper([T.RandomRotation((5, 10))])).draw((40, 40))


def test_more_objects_than_annotations_are_an_error():
    with pytest.raises(ConfigError, match=r"gives 1 objects for 0.png, which has 0 annotations"):
        foreseen(MapperThatAdds([RESIZE]))


def test_a_dataset_dict_without_a_size_is_an_error(monkeypatch):
    without = {key: value for key, value in DICTS[3].items() if key != "height"}
    monkeypatch.setitem(globals(), "DICTS", [*DICTS[:3], without, *DICTS[4:]])
    with pytest.raises(ConfigError, match=r"3.png has no height and width"):
        foreseen(Mapper([RESIZE]), aspect_ratio_grouping=False)
