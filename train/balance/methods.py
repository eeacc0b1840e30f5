"""All balance methods: the import registers those of the package."""

from train.balance import by_gradients, by_held_out, by_history, by_losses  # noqa: F401
from train.balance.registry import METHODS

__all__ = ["METHODS"]
