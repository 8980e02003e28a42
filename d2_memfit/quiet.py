"""Warnings of libraries that are for their developers, and not for who types a command."""

import logging
import sys
import warnings

__all__ = ["ignore_warnings_of_libraries"]


def ignore_warnings_of_libraries() -> None:
    """Call it in a program before PyTorch and Detectron2 are imported.

    Python's option -W and PYTHONWARNINGS still count.
    """
    if sys.warnoptions:
        return
    # Detectron2 v0.6 and its libraries against a current Python and PyTorch
    for category in (DeprecationWarning, FutureWarning, SyntaxWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", "pkg_resources is deprecated", UserWarning)
    warnings.filterwarnings("ignore", "torch.meshgrid", UserWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
    # "No CUDA runtime is found", where nothing is compiled
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # Of is_fx_tracing, which Detectron2 main imports
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on kernels that it does not need
