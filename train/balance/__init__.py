"""Several tasks, one step: how their losses or gradients are combined.

`config.py` names the methods and what fits together. `balancer.py` (and `bilevel.py`) is what a training loop holds;
`feature_hook.py` combines tasks between encoder and decoder. The methods are functions of what a step shows (`given.py`):
losses (`by_losses.py`), or one gradient per task (`rows.py`, `by_gradients.py`, `by_history.py`).
"""
