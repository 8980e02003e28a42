# Copyright (c) the d2_memfit developers.
"""Techniques that use less memory. They know nothing of trainers."""
