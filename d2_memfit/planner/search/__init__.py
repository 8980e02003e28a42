# Copyright (c) the d2_memfit developers.
"""The search for the plan that changes least and is fastest."""

from .plan import *
from .search import *
from .selective import *
from .trials import *
