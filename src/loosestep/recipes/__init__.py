"""Complete training problems: models, data, metrics and learning-rate rules."""

from .base import Example, Option, Progress, Quality, Recipe, Task, Training
from .errors import RecipeError
from .find import find_recipe
from .order import BatchStream, Order
from .own import DatasetTask
from .schedules import Schedule, local_scale, schedule

__all__ = [
    "BatchStream",
    "DatasetTask",
    "Example",
    "Option",
    "Order",
    "Progress",
    "Quality",
    "Recipe",
    "RecipeError",
    "Schedule",
    "Task",
    "Training",
    "find_recipe",
    "local_scale",
    "schedule",
]
