# Copyright (c) the d2_memfit developers.
"""Filters for library warnings that concern developers, not users of a command."""

import logging
import sys
import warnings

__all__ = ["ignore_warnings_of_libraries"]


def ignore_warnings_of_libraries() -> None:
    """Ignore warnings. Call this before PyTorch and Detectron2 are imported.

    Python's option -W and PYTHONWARNINGS still apply.
    """
    if sys.warnoptions:
        return
    # Detectron2 v0.6 and its libraries against a current Python and PyTorch
    for category in (DeprecationWarning, FutureWarning, SyntaxWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", "pkg_resources is deprecated", UserWarning)
    warnings.filterwarnings("ignore", "torch.meshgrid", UserWarning)
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # Pillow refuses twice as many
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
    # Of AMPTrainer on a CPU, whose scaler is replaced
    warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled", UserWarning)
    # "No CUDA runtime is found", though nothing is compiled
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # From is_fx_tracing, which Detectron2 main imports
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # about kernels that it does not need
