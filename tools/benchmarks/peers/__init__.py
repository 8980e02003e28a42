# Copyright (c) the d2_memfit developers.
"""The race of d2_memfit against other tools that accumulate gradients, one file per tool."""
