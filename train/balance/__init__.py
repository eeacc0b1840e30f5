"""Multi-task balance: combines the losses or gradients of several tasks in one training step.

Methods are functions of their input from a step (`given.py`), registered with what they need (`registry.py`): losses
(`by_losses.py`), one gradient per task (`rows.py`, `by_gradients.py`, `by_history.py`), or held-out batches
(`by_held_out.py`). The training loop uses a `Balancer` (`balancer.py`) or `Bilevel` (`bilevel.py`); `feature_hook.py` combines
tasks between encoder and decoder.
"""

from train.balance.registry import Setting, register_method

__all__ = ["Setting", "register_method"]
