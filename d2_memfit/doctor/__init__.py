# Copyright (c) the d2_memfit developers.
"""Checks of what works with a job, by small iterations on the CPU."""
