"""Trains speech language models. From Python, without a YAML file of one's own:

    from train import fit, recipe

    outcome = fit(recipe("nano", budget={"minutes": 3}, run_folder="runs/mine"))
    outcome.figures, outcome.model  # of the last validation; the finished model's folder

`FitConfig` is the configuration itself, all of whose keys `omni-train fit --help` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config.parse import recipe as recipe
    from train.config.run import FitConfig as FitConfig
    from train.trainer.build import fit as fit
    from train.trainer.parts import Outcome as Outcome

__all__ = ["FitConfig", "Outcome", "fit", "recipe"]

_MODULES = {"FitConfig": "config.run", "Outcome": "trainer.parts", "fit": "trainer.build", "recipe": "config.parse"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for: PyTorch takes seconds, and `--help` needs none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'train' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"train.{_MODULES[name]}"), name)
