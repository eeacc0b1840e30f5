"""Several tasks, one step: how their losses or gradients are combined.

`config.py` names the methods and what fits together, `balancer.py` (and `bilevel.py`) is what a training loop holds, `tap.py`
sits between encoder and decoder. The methods are functions of what a step shows (`given.py`): losses (`by_losses.py`), or one
gradient per task (`rows.py`, `by_gradients.py`, `by_history.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from train.balance.balancer import Balancer
from train.balance.bilevel import Bilevel
from train.balance.config import BalanceConfig


def build(config: BalanceConfig, tasks: Sequence[str]) -> Balancer | Bilevel:
    """What a run holds for the named tasks.

    Raises:
        UserError: fewer than two tasks, or more than can be balanced.
    """
    return Bilevel(config, tasks) if config.method in ("autolambda", "moml", "forum") else Balancer(config, tasks)
