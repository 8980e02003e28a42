# Copyright (c) the d2_memfit developers.
"""Estimates and plans of a job's memory, made before training and without a GPU.

An estimate assumes the following. Where no source is named, the job's own code or config says so.

The batch (``job``)
    - Images have the largest sizes of the datasets. The i-th image of a batch has as many
      annotations as the i-th most crowded one. Random augmentations: the largest of at most 8 draws
      for each size, a guess.
    - Datasets that cannot be read: ``job/known_datasets.py``, each with its source or as a guess.
    - Sizes that a dataset does not give are read from at most 10,000 of its files, evenly spread.
    - Classes of label images are counted in 100 of them: a guess if there are more.
    - Evaluation runs one image at a time, as Detectron2's test loader does.

The step (``steps``, ``dry_run``, ``worst_outputs``)
    - It is not the first: optimizer states and DDP's buckets exist. With accumulation, the
      gradients of earlier micro-batches do.
    - Values of activations are not known. Small results are zeros, or a layer's bias; masks made of
      them are false. Hungarian matching takes any match.
    - ROI heads get as many proposals as their generator may give, enough of them on objects to fill
      the quota. ``fast_rcnn_inference`` detects as many as it may, each as large as the image.
      Of another model that detects nothing, the estimate is at least.
    - PyTorch's meta kernels and autograd of this machine save what those of the GPU save. Casts of
      autocast are CUDA's: ATen/autocast_mode.h.
    - Operators that only Detectron2 or Deformable DETR compile take the buffers of their CUDA code.
    - Optimizers step on all parameters at once on a GPU: docs.pytorch.org/docs/stable/optim.html.
    - ZeRO deals parameters like ``ZeroRedundancyOptimizer``; the estimate is for the fullest rank.

The device (``device_model``, ``allocators``, ``devices/*.yaml``)
    - A card without a file of its own is like the nearest one of its compute capability, a guess.
    - The allocator is that of c10/cuda/CUDACachingAllocator.cpp, without other streams. A CPU gives
      freed pages back at once, which ``enforce_budget`` arranges.
    - A convolution takes copies of its tensors in another layout: a guess, not measured on a card.
      Larger workspaces do not count: where one does not fit, PyTorch takes the next algorithm.
    - cuBLAS workspaces: ATen/cuda/CublasHandlePool.cpp. Context: reports of others; on a CPU, what
      the process that estimates has taken. Loaded kernels: a guess. NCCL: NVIDIA/nccl#964, and a
      guess for cards without NVLink.
    - A CPU's process takes 220 MB in addition to its tensors: measured (docs/PLANNER.md). A small
      job takes 50 MB: measured (tests/planner/test_tight_budgets.py).

The range, and the margin of plans (``ranges``)
    - Objects, software, allocator and context, each with its source or as a guess.
    - The margin is the range's part for software and context, above the worst case.
    - A plan that needs its margin is made all the same, with a warning.
    - What the allocator keeps must fit the budget without being given back. One iteration is
      simulated: that later ones keep no more is a guess.

The time (``device_model``, ``dry_job``)
    - Each operator takes its computation or its memory traffic, whichever is longer, at shares of
      the data sheets' peaks, and 22 us in addition; a micro-batch takes 23 ms in addition. These
      are fitted to published times, and so are the ranges (``times``). They are for GPUs.
    - Micro-batches take time in proportion to their images.
    - Ranks do not wait for each other. ZeRO sends the parameters at the speed of copies to the
      host, a guess: links between GPUs can be faster, and a network is slower.

The host (``techniques/host_budget.py``)
    - A rough figure, without the dataset.
"""

from .estimates import estimate_memory
from .planned_run import fit_config
from .search import plan_memory

__all__ = ["estimate_memory", "fit_config", "plan_memory"]
