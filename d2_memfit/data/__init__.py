# Copyright (c) the d2_memfit developers.
"""Users' own datasets: registration by files, checks, and the settings that follow from them."""
