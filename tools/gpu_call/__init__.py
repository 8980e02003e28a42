# Copyright (c) the d2_memfit developers.
"""The measurement of a card that is there for a few minutes: README.md."""
