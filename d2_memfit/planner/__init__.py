# Copyright (c) the d2_memfit developers.
"""Estimates and plans of a job's memory, made before training and without a GPU.

An estimate assumes the following. If no source is named, it follows from the job's code or config.

The batch (``job``)
    - Images have the largest sizes of the datasets. The i-th image of a batch has as many
      annotations as the i-th most crowded one. Random augmentations: the largest of 200 draws
      (``job/worst_batch.py``).
    - Datasets that cannot be read: ``job/datasets.py``, each with its source or as a guess.
    - If a dataset has no sizes, they are read from at most 10,000 of its files, evenly spread.
    - Classes of label images are counted in 100 of them: a guess if there are more.
    - Evaluation runs one image at a time, as Detectron2's test loader does.
    - How many objects fit: in each module, memory is on a line in objects.

The step (``steps``, ``dry_run``, ``values``)
    - It is not the first: optimizer states and DDP's buckets exist. With accumulation, the
      gradients of earlier micro-batches do.
    - Values of activations are not known. Small results are zeros, or a layer's bias; masks made of
      them are false. Hungarian matching uses an arbitrary match.
    - ROI heads get as many proposals as their generator may give, enough of them on objects to fill
      the quota. ``fast_rcnn_inference`` detects as many as it may, each as large as the image.
      If another model detects nothing, the estimate is a lower bound.
    - PyTorch's meta kernels and autograd of this machine save what those of the GPU save. Casts of
      autocast are CUDA's: ATen/autocast_mode.h.
    - Compiled operators of Detectron2 and Deformable DETR use the buffers of their CUDA code.
    - Optimizers step on all parameters at once on a GPU: docs.pytorch.org/docs/stable/optim.html.
    - ZeRO distributes parameters as ``ZeroRedundancyOptimizer`` does; the estimate is for the rank
      with the most.

The device (``device``, ``allocators``, ``config/cards.csv``)
    - A card without its own row has the numbers of a current one, a guess.
    - The allocator is that of c10/cuda/CUDACachingAllocator.cpp, without other streams. A CPU
      returns freed pages at once, because of ``enforce_budget``.
    - A convolution needs copies of its tensors in another layout: a guess, not measured on a card.
      Larger workspaces are not counted: if one does not fit, PyTorch uses the next algorithm.
    - cuBLAS workspaces: ATen/cuda/CublasHandlePool.cpp. Context: reports of others; on a CPU, what
      the process that estimates has taken. Loaded kernels: a guess. NCCL: NVIDIA/nccl#964, and a
      guess for cards without NVLink.
    - A process on a CPU takes 220 MB in addition to its tensors: measured (docs/HOW_ACCURATE.md).

The range, and the margin of plans (``estimate``, ``peaks``)
    - The margin is the range's part for software and context, above the worst case.
    - The memory that the allocator keeps must fit the budget without being returned. One iteration
      is simulated: it is a guess that later ones do not keep more.
    - A mask or keypoint head may run on few proposals: 0.6 of its activations less, as four
      proposals on each object give in two models of Detectron2's zoo.
    - More images are on lines through dry runs of 2 and of 3. The memory between the allocator's
      blocks is the same share of the tensors as with 3.

The host (``techniques/host.py``)
    - A rough figure, without the dataset. Offloaded tensors take page-locked memory in powers of
      two (ATen/core/CachingHostAllocator.h).
"""
