"""The acoustic recipe: a deep bidirectional LSTM on speech."""

from .model import AcousticModel
from .recipe import PRESETS, AcousticOptions, AcousticRecipe, AcousticTask

__all__ = ["PRESETS", "AcousticModel", "AcousticOptions", "AcousticRecipe", "AcousticTask"]
