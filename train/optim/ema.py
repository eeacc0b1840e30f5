"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omni.errors import UserError


class Average:
    """Exponential moving average of the trainable weights, in fp32; sharded where they are.

    The decay at step n is at most (1 + n) / (10 + n): early on the average follows faster, and soon forgets the random start.
    """

    def __init__(self, params: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise UserError(f"ema is {decay}; it must lie between 0 and 1, such as 0.999")
        self.decay = decay
        self.params = dict(params)
        self.values = {name: p.detach().float().clone() for name, p in self.params.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the weights after optimizer step number `step` (counted from 1)."""
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        params, values = [p.detach() for p in self.params.values()], [self.values[name] for name in self.params]
        if all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in params):
            torch._foreach_lerp_(values, params, weight)  # a few launches on a GPU, instead of one for each parameter
            return
        for value, p in zip(values, params, strict=True):
            value.lerp_(p.float(), weight)
