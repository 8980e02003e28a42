# Copyright (c) the d2_memfit developers.
"""Prediction with a trained model on images and videos, tile by tile if they are too large."""
