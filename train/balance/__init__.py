"""Several tasks, one step: how their losses or gradients are combined.

`config.py` names the methods and what fits together, `balancer.py` (and `bilevel.py`) is what a training loop holds, `tap.py`
sits between encoder and decoder. The methods are functions of what a step shows (`given.py`): losses (`by_losses.py`), or one
gradient per task (`rows.py`, `by_gradients.py`, `by_history.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.balance.config import BalanceConfig

if TYPE_CHECKING:
    from train.balance.balancer import Balancer
    from train.balance.bilevel import Bilevel

_PLACES = {"Balancer": "train.balance.balancer", "Bilevel": "train.balance.bilevel"}

__all__ = ["BalanceConfig", "Balancer", "Bilevel", "build"]


def __getattr__(name: str) -> Any:
    """Import what computes when it is asked for: a configuration is read without PyTorch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'train.balance' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def build(config: BalanceConfig, tasks: Sequence[str]) -> Balancer | Bilevel:
    """What a run holds for the named tasks.

    Raises:
        UserError: fewer than two tasks, or more than can be balanced.
    """
    from train.balance.balancer import Balancer
    from train.balance.bilevel import Bilevel

    return Bilevel(config, tasks) if config.method in ("autolambda", "moml", "forum") else Balancer(config, tasks)
