# Copyright (c) the d2_memfit developers.
"""The memory of one job: its step run dry, and what that takes of a device."""

from .dry_job import *
from .estimate import *
from .from_runs import *
from .objects import *
from .probe import *
from .ranges import *
from .steps import *
from .times import *
