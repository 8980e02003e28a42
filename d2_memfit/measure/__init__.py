# Copyright (c) the d2_memfit developers.
"""Measurements of a GPU's memory and speed, and checks of d2_memfit on it."""
