# Copyright (c) the d2_memfit developers.
"""Training: one window of images per iteration, with recovery from out-of-memory errors."""
