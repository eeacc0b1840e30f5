"""Multi-task balance: combines the losses or gradients of several tasks in one training step.

`config.py` lists the methods, their levels and settings. The training loop uses a `Balancer` (`balancer.py`) or `Bilevel`
(`bilevel.py`); `feature_hook.py` combines tasks between encoder and decoder. Methods are functions of their input from a step
(`given.py`): losses (`by_losses.py`), or one gradient per task (`rows.py`, `by_gradients.py`, `by_history.py`).
"""
