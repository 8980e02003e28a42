# Copyright (c) the d2_memfit developers.
"""Prediction with a trained model, tile by tile if an image is too large."""

from .estimate import *
from .grid import *
from .images import *
from .merge import *
from .pictures import *
from .predict import *
from .predictor import *
from .results import *
from .rle import *
