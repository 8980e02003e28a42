# Copyright (c) the d2_memfit developers.
"""Each private name of Detectron2 and PyTorch that we use: it is there, and does what it is for."""

from itertools import islice

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from detectron2.data.common import MapDataset
from detectron2.data.samplers import InferenceSampler, TrainingSampler
from detectron2.engine import TrainerBase
from detectron2.engine.hooks import BestCheckpointer, EvalHook, PeriodicCheckpointer
from fvcore.common.checkpoint import Checkpointer
from private_names import PACKAGE, missing, moved, names_in, own_names, private_names
from tiny import ROOT
from torch import nn
from torch.utils.data import IterableDataset

from d2_memfit.common import compat
from d2_memfit.common.patching import replaced_functions

DOOR = PACKAGE / "common" / "compat.py"
# With the arguments that they are called with; None where they are not called, or are of C++ and
# say no signature. The tests below call those.
NAMES = {
    "detectron2.data.common._MapIterableDataset": ("dataset", "function"),
    "detectron2.data.dataset_mapper.DatasetMapper._transform_annotations": (
        *("self", "dataset_dict", "transforms", "image_shape"),  # projects/TiledImages
    ),
    "detectron2.evaluation.COCOEvaluator._derive_coco_results": ("self", "eval", "task", "names"),
    "detectron2.utils.comm._LOCAL_PROCESS_GROUP": None,
    "detectron2.utils.events._CURRENT_STORAGE_STACK": None,
    "fvcore.common.checkpoint.Checkpointer._load_file": ("self", "file"),
    "fvcore.common.checkpoint.Checkpointer._load_model": ("self", "checkpoint"),
    "torch.nn.modules.batchnorm._BatchNorm": None,
    "torch.nn.modules.conv._ConvNd": None,
    "torch.nn.modules.utils._pair": (1,),
    "torch._utils._take_tensors": ("tensors", "size_limit"),
    "torch.utils._device.DeviceContext.__init__": ("self", "device"),
    "torch.utils._device._device_constructors": (),
    "torch.utils._python_dispatch.TorchDispatchMode": None,
    "torch.utils._pytree.tree_flatten": ("tree",),
    "torch.utils._pytree.tree_iter": ("tree",),
    "torch.utils._pytree.tree_map": ("function", "tree"),
    "torch.utils._pytree.tree_unflatten": ("leaves", "specification"),
    "torch.multiprocessing._prctl_pr_set_pdeathsig": None,
    "torch.jit._builtins._find_builtin": ("function",),
    "torch.jit._builtins._register_builtin": ("function", "name"),
    "torch.cuda.memory._record_memory_history": ("enabled",),
    "torch.cuda.memory._dump_snapshot": ("file",),
    "torch.Tensor._make_wrapper_subclass": None,
    "torch._C._autograd._get_sequence_nr": None,
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": ("self",),
    "torch._C._nn.cross_entropy_loss": None,
    "torch._C._current_autograd_node": None,
    "torch._C._current_graph_task_id": None,
    "torch._C._disabled_torch_function_impl": None,
    # planner/cuda_as_cpu.py replaces it where it is
    "torch.amp.autocast_mode._cast": ("value", "device", "dtype"),
    # collectives.py replaces them where they are
    "torch.distributed.ProcessGroup._allgather_base": None,
    # startup.py has its name only
    "torch.fx._symbolic_trace": None,
    # operators of ATen and torchvision
    "torch.ops.aten._reshape_alias.default": None,
    "torch.ops.aten._to_copy.default": None,
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": (),
    "torch.ops.aten._unsafe_view.default": None,
    "torch.ops.torchvision._deform_conv2d_backward": None,
}
if torch.version.cuda is not None:
    NAMES["torch._C._cuda_clearCublasWorkspaces"] = None
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):  # 2.8 does not ask
    # DispatchMode overrides it
    NAMES["torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo"] = None

# Attributes that classes have, or that their objects get from them.
ATTRIBUTES = {
    "detectron2.data.common._MapIterableDataset": ["_dataset", "_map_func"],
    "detectron2.data.samplers.TrainingSampler": ["_seed"],
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
    "torch.UntypedStorage": ["_cdata"],
    "torch.Tensor": ["_version"],
    "torch._ops.OpOverload": ["_schema"],
    "torch.nn.parallel.DistributedDataParallel": ["_comm_hooks"],
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": ["_shutdown_workers", "_workers"],
}
ELSEWHERE = {
    "_data_loader_iter_obj",  # of Detectron2's main only, which compat.py looks for
    *("_sequence_nr", "_buffers"),  # by a backward and by a module, below
    *(() if torch.version.cuda else ("_cuda_clearCublasWorkspaces",)),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there_and_takes_what_it_is_given(name):
    text = moved(name, NAMES[name])
    assert not text, text


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_private_attributes_are_there(name):
    text = missing(name, ATTRIBUTES[name])
    assert not text, text


OF_LIBRARIES = private_names(DOOR, "detectron2") | private_names(DOOR, "torch")


def test_every_private_name_is_tested():
    assert OF_LIBRARIES - names_in(NAMES, ATTRIBUTES) == ELSEWHERE


FILES = [file for folder in ("d2_memfit", "projects") for file in (ROOT / folder).rglob("*.py")]


def private_names_of_libraries(file, own):
    """Those that a file uses of PyTorch and Detectron2, but for operators. What no file of ours
    names is taken for theirs.
    """
    used = private_names(file, "torch") | private_names(file, "detectron2")
    return {n for n in used if n in OF_LIBRARIES or n not in own} - {
        *("_deform_conv2d_backward", "_reshape_alias", "_to_copy", "_unsafe_view")
    }


def test_private_names_stand_in_one_file():
    own = own_names(PACKAGE) | own_names(ROOT / "projects")
    found = {file: private_names_of_libraries(file, own) for file in FILES if file != DOOR}
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
    assert [int(index) for index in islice(sampler, 5)] == [0, 1, 2, 3, 0]


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


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda *a: nn.CrossEntropyLoss(a[2])(*a[:2])])
def test_cross_entropies_end_in_one_operator(loss):
    logits, target, weight = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.ones(3)
    calls = []

    def note(original):
        return lambda *args: calls.append(args) or original(*args)

    owner = compat.cross_entropy_owner
    with replaced_functions(([owner], {"cross_entropy_loss": note})):
        loss(logits, target, weight)
    [(_, _, given, reduction, ignore_index, label_smoothing)] = calls
    assert given is weight
    assert (reduction, ignore_index, label_smoothing) == (1, -100, 0.0)


def test_a_backward_is_told_by_its_nodes_number():
    seen = []
    x = torch.ones(3, requires_grad=True)
    number = compat.next_autograd_node_number()
    y = x.sin()

    class Look(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((compat.is_in_backward(), compat.autograd_node_number()))
            return func(*args, **(kwargs or {}))

    assert not compat.is_in_backward()
    assert compat.autograd_node_number() is None
    with Look():
        y.backward(torch.ones(3))
    assert (True, number) in seen


def test_questions_for_the_default_group_are_answered():
    with compat.default_group_replaced(3):
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 3)
        with compat.default_group_replaced(None):
            assert not dist.is_initialized()
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_the_own_buffers_of_a_module_can_be_changed():
    module = torch.nn.BatchNorm2d(2)
    compat.own_buffers(module)["running_mean"] = torch.ones(2)
    assert module.running_mean.sum() == 2
