"""The vision recipe: residual networks on small and large images."""

from .recipe import PRESETS, VisionOptions, VisionRecipe, VisionTask
from .resnet import ResNet, resnet

__all__ = ["PRESETS", "ResNet", "VisionOptions", "VisionRecipe", "VisionTask", "resnet"]
