# Copyright (c) the d2_memfit developers.
"""Private names that classes of ours share with the classes of libraries that they derive from."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap

import d2_memfit

LIBRARIES = ("detectron2", "fvcore", "torch")

# In Detectron2 v0.6 and main.
SHARED = {
    "detectron2.checkpoint.detection_checkpoint.DetectionCheckpointer._load_file",
    "detectron2.checkpoint.detection_checkpoint.DetectionCheckpointer._load_model",
    "detectron2.engine.train_loop.SimpleTrainer._data_loader_iter",
    "detectron2.utils.events.EventStorage._current_prefix",
    "detectron2.utils.events.EventStorage._history",
    "detectron2.utils.events.EventStorage._latest_scalars",
    "fvcore.common.checkpoint.Checkpointer._load_file",
    "fvcore.common.checkpoint.Checkpointer._load_model",
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer._all_state_dicts",
}
OF_SOME_RELEASES = {
    "detectron2.modeling.meta_arch.fcos.FCOS._match_anchors",  # main, not v0.6
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",  # not in 2.8
}


def own_classes():
    for found in pkgutil.walk_packages(d2_memfit.__path__, "d2_memfit."):
        if not found.name.endswith("__main__"):
            for cls in vars(importlib.import_module(found.name)).values():
                if inspect.isclass(cls) and cls.__module__ == found.name:
                    yield cls


def private_names_of(cls):
    """Those that a class defines, or uses of itself."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))))
    names = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    names |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return {name for name in names if re.match(r"_[^_]", name)}


def has(base, name):
    return name in vars(base) or re.search(rf"\bself\.{name} = ", inspect.getsource(base))


def test_each_is_known():
    """One that a library renames, or begins to use, is missing or new here."""
    found = {
        f"{base.__module__}.{base.__qualname__}.{name}"
        for cls in own_classes()
        for base in cls.__mro__[1:]
        if base.__module__.partition(".")[0] in LIBRARIES
        for name in private_names_of(cls)
        if has(base, name)
    }
    assert found - SHARED <= OF_SOME_RELEASES
    assert found >= SHARED
