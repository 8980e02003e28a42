# Copyright (c) the d2_memfit developers.
"""Measurements of a GPU's memory and speed, against what d2_memfit predicts."""
