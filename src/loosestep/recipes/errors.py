"""The mistakes of a user that a recipe finds."""

from __future__ import annotations


class RecipeError(ValueError):
    """An option, a file or its content is not usable; the message says which, what was expected
    and what to do.
    """


def require(condition: bool, message: str) -> None:
    """Raise a RecipeError with this message unless the condition holds."""
    if not condition:
        raise RecipeError(message)
