# Copyright (c) the d2_memfit developers.
"""The table of config keys, config files, cards and the checked settings of a run."""
