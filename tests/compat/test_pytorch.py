# Copyright (c) the d2_memfit developers.
"""Each private name of PyTorch that d2_memfit uses: it is there, and does what it is used for."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from private_names import missing, moved, names_in, private_names
from tiny import ROOT
from torch import nn

from d2_memfit.common.patching import replaced_functions
from d2_memfit.compat import pytorch as torch_private

PACKAGE = ROOT / "d2_memfit"

# Names of PyTorch, each with the arguments that it is called with; None where it is not called, or
# is of C++ and says no signature. The tests below call those.
NAMES = {
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
    # memory/meter.py overrides it
    NAMES["torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo"] = None


# Attributes that classes have, or that their objects get from them.
ATTRIBUTES = {
    "torch.UntypedStorage": ["_cdata"],
    "torch.Tensor": ["_version"],
    "torch._ops.OpOverload": ["_schema"],
    "torch.nn.parallel.DistributedDataParallel": ["_comm_hooks"],
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": ["_shutdown_workers", "_workers"],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_there_and_takes_what_it_is_given(name):
    text = moved(name, NAMES[name])
    assert not text, text


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_private_attributes_are_there(name):
    text = missing(name, ATTRIBUTES[name])
    assert not text, text


def test_every_private_name_is_tested():
    used = private_names(PACKAGE / "compat/pytorch.py", "torch")
    elsewhere = {"_sequence_nr", "_buffers"}  # by a backward and by a module, below
    if torch.version.cuda is None:
        elsewhere.add("_cuda_clearCublasWorkspaces")
    assert used - names_in(NAMES, ATTRIBUTES) == elsewhere


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda *a: nn.CrossEntropyLoss(a[2])(*a[:2])])
def test_cross_entropies_end_in_one_operator(loss):
    logits, target, weight = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.ones(3)
    calls = []

    def note(original):
        return lambda *args: calls.append(args) or original(*args)

    owner = torch_private.cross_entropy_owner
    with replaced_functions([owner], {"cross_entropy_loss": note}):
        loss(logits, target, weight)
    [(_, _, given, reduction, ignore_index, label_smoothing)] = calls
    assert given is weight
    assert (reduction, ignore_index, label_smoothing) == (1, -100, 0.0)


def test_a_backward_is_told_by_its_nodes_number():
    seen = []
    x = torch.ones(3, requires_grad=True)
    number = torch_private.next_autograd_node_number()
    y = x.sin()

    class Look(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((torch_private.is_in_backward(), torch_private.autograd_node_number()))
            return func(*args, **(kwargs or {}))

    assert not torch_private.is_in_backward()
    assert torch_private.autograd_node_number() is None
    with Look():
        y.backward(torch.ones(3))
    assert (True, number) in seen


def test_questions_for_the_default_group_are_answered():
    with torch_private.default_group_replaced(3):
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 3)
        with torch_private.default_group_replaced(None):
            assert not dist.is_initialized()
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_the_own_buffers_of_a_module_can_be_changed():
    module = torch.nn.BatchNorm2d(2)
    torch_private.own_buffers(module)["running_mean"] = torch.ones(2)
    assert module.running_mean.sum() == 2
