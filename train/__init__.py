"""Trains speech language models. From Python, without a YAML file of one's own:

    from train import fit, recipe

    outcome = fit(recipe("nano", budget={"minutes": 3}, run_folder="runs/mine"))
    outcome.figures, outcome.model  # of the last validation; the finished model's folder

`FitConfig` is the configuration itself, all of whose keys `omni-train fit --help` lists. The decorators `register_...` and the
classes beside them are for plug-ins (docs/extending.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.balance.registry import register_method as register_method
    from train.config.parse import recipe as recipe
    from train.config.run import FitConfig as FitConfig
    from train.data.readers import register_reader as register_reader
    from train.data.sources import SourceOptions as SourceOptions
    from train.data.sources import register_source as register_source
    from train.data.tts.voices import register_voice as register_voice
    from train.eval.measures import register_metric as register_metric
    from train.trainer.build import fit as fit
    from train.trainer.parts import Callback as Callback
    from train.trainer.parts import Outcome as Outcome
    from train.trainer.parts import register_callback as register_callback

_MODULES = {
    "Callback": "trainer.parts",
    "FitConfig": "config.run",
    "Outcome": "trainer.parts",
    "SourceOptions": "data.sources",
    "fit": "trainer.build",
    "recipe": "config.parse",
    "register_callback": "trainer.parts",
    "register_method": "balance.registry",
    "register_metric": "eval.measures",
    "register_reader": "data.readers",
    "register_source": "data.sources",
    "register_voice": "data.tts.voices",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for: PyTorch takes seconds, and `--help` needs none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'train' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"train.{_MODULES[name]}"), name)
