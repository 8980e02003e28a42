# Copyright (c) the d2_memfit developers.
"""Each private name of Detectron2 that d2_memfit uses: it is there, in v0.6 and in main."""

import pytest
from detectron2.data.common import MapDataset
from detectron2.data.samplers import InferenceSampler, TrainingSampler
from detectron2.engine import TrainerBase
from detectron2.engine.hooks import BestCheckpointer, EvalHook, PeriodicCheckpointer
from fvcore.common.checkpoint import Checkpointer
from private_names import PACKAGE, missing, moved, names_in, own_names, private_names
from tiny import ROOT
from torch import nn
from torch.utils.data import IterableDataset

from d2_memfit import compat

# With the arguments that they are called with; None where they are not called.
NAMES = {
    "detectron2.data.common._MapIterableDataset": ("dataset", "function"),
    "detectron2.data.dataset_mapper.DatasetMapper._transform_annotations": (
        *("self", "dataset_dict", "transforms", "image_shape"),  # projects/TiledImages
    ),
    "detectron2.data.samplers.TrainingSampler._infinite_indices": ("self",),
    "detectron2.evaluation.COCOEvaluator._derive_coco_results": ("self", "eval", "task", "names"),
    "detectron2.utils.comm._LOCAL_PROCESS_GROUP": None,
    "detectron2.utils.events._CURRENT_STORAGE_STACK": None,
    "fvcore.common.checkpoint.Checkpointer._load_file": ("self", "file"),
    "fvcore.common.checkpoint.Checkpointer._load_model": ("self", "checkpoint"),
}
ATTRIBUTES = {
    "detectron2.data.common._MapIterableDataset": ["_dataset", "_map_func"],
    "detectron2.data.samplers.TrainingSampler": ["_rank", "_seed", "_world_size"],
    "detectron2.data.samplers.RandomSubsetTrainingSampler": ["_indexes_subset", "_seed_subset"],
    "detectron2.engine.DefaultTrainer": ["_trainer"],
    "detectron2.engine.SimpleTrainer": ["_data_loader_iter"],
    "detectron2.engine.TrainerBase": ["_hooks"],
    "detectron2.engine.hooks.BestCheckpointer": ["_period"],
    "detectron2.engine.hooks.EvalHook": ["_period"],
    "detectron2.evaluation.COCOEvaluator": [
        *("_coco_api", "_distributed", "_do_evaluation", "_kpt_oks_sigmas", "_logger"),
        *("_max_dets_per_image", "_metadata", "_tasks"),
    ],
}
# Main only, which compat/__init__.py looks for.
ONE_RELEASE = {"_data_loader_iter_obj"}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there_and_takes_what_it_is_given(name):
    text = moved(name, NAMES[name])
    assert not text, text


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_private_attributes_are_there(name):
    text = missing(name, ATTRIBUTES[name])
    assert not text, text


def test_every_private_name_is_tested():
    used = private_names(PACKAGE / "compat/__init__.py", "detectron2")
    assert used - names_in(NAMES, ATTRIBUTES) == ONE_RELEASE


OF_LIBRARIES = {
    name
    for file, library in [("compat/__init__.py", "detectron2"), ("compat/pytorch.py", "torch")]
    for name in private_names(PACKAGE / file, library)
}
FILES = [file for folder in ("d2_memfit", "projects") for file in (ROOT / folder).rglob("*.py")]


def private_names_of_libraries(file, own):
    """Those that a file uses of PyTorch and Detectron2, but for operators. What no file of ours
    names is taken for theirs.
    """
    used = private_names(file, "torch") | private_names(file, "detectron2")
    return {n for n in used if n in OF_LIBRARIES or n not in own} - {
        *("_deform_conv2d_backward", "_reshape_alias", "_to_copy", "_unsafe_view")
    }


def test_private_names_stand_in_one_file_for_each_library():
    own = own_names(PACKAGE) | own_names(ROOT / "projects")
    doors = {PACKAGE / "compat/__init__.py", PACKAGE / "compat/pytorch.py"}
    found = {file: private_names_of_libraries(file, own) for file in FILES if file not in doors}
    assert not {str(f.relative_to(ROOT)): names for f, names in found.items() if names}


class Images(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


def test_a_loader_is_taken_from_what_is_mapped_over_it():
    loader = Images()
    over = MapDataset(loader, str)
    function, without = compat.split_map(over)
    assert (function(1), without) == ("1", loader)
    assert compat.split_map(loader) == (None, loader)


def test_only_endless_samplers_deal_their_indices():
    sampler = TrainingSampler(4, shuffle=False)
    assert compat.deals_its_indices(sampler)
    assert not compat.deals_its_indices(InferenceSampler(4))
    assert (compat.rank_of(sampler), compat.num_ranks_of(sampler)) == (0, 1)
    indices = compat.endless_indices(sampler)
    assert [int(next(indices)) for _ in range(5)] == [0, 1, 2, 3, 0]


def test_hooks_and_periods_of_a_trainer_are_found():
    trainer = TrainerBase()
    evaluation = EvalHook(5, lambda: {"AP": 1.0})
    checkpointer = Checkpointer(nn.Module())
    best = BestCheckpointer(3, checkpointer, "AP")
    savers = [best, PeriodicCheckpointer(checkpointer, 2)]
    trainer.register_hooks([evaluation, *savers])
    assert compat.inner_trainer(trainer) is trainer
    assert len(compat.hooks_of(trainer)) == 3
    assert compat.periods_of_states(trainer) == {2, 3, 5}
