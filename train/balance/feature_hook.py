"""A feature hook between encoder and decoder, which combines the tasks within one ordinary backward pass.

In a packed batch every position of the features belongs to one task. The gradient of the total loss at the features thus
consists of the gradients of all tasks, position by position: summed by task they are the rows, and multiplied by the tasks'
weights the combined gradient, which goes on into the encoder. No loss is differentiated twice, and all wrappers of the module
(DDP, FSDP2, checkpointing, autocast) see one forward and one backward. Parameters above the hook are trained by the plain sum
of the losses.

Dimensions: m tasks, N positions, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from train.balance.chooser import BalanceReport, Chooser
from train.balance.rows import Rows, Sum, alone


class FeatureHook:
    """Combines the tasks' gradients at the features: called in the forward pass, `hook(features, task)`, acts in the backward.

    Between the two the training loop may set the attributes.

    Attributes:
        losses: the step's losses [m], summed over processes; ones by default, for methods that do not need them.
        counts: targets of each task in the step, [m]; all present by default. A task without any feature is absent anyway.
        last: this is the step's last micro-batch, so that the method's state is updated. The weights of an earlier one are
            chosen by the micro-batches so far.
        scale: of the gradients (a loss scaler's).
        report: of the last backward pass.
    """

    def __init__(self, balancer: Chooser, reduce: Sum = alone) -> None:
        if balancer.config.at != "features":
            raise ValueError(f"{balancer.config.method} is at level {balancer.config.at}; a feature hook is for level features")
        self.balancer, self.reduce = balancer, reduce
        self.losses: Tensor | None = None
        self.counts: Tensor | None = None
        self.last, self.scale = True, 1.0
        self.report: BalanceReport | None = None
        self._rows: Tensor | None = None

    def __call__(self, features: Tensor, task: Tensor) -> Tensor:
        """Return the features [N, C] unchanged; task [N] long, below 0 for a position of no task."""
        return _Hooked.apply(features, task, self) if torch.is_grad_enabled() else features

    def change(self, features: Tensor, task: Tensor, gradient: Tensor) -> Tensor:
        """Replace the features' gradient [N, C] by the combined one."""
        balancer, m = self.balancer, len(self.balancer.tasks)
        values = gradient.float() / self.scale
        if balancer.config.kind.signs:
            values = values * features.sign()
        place = torch.where(task < 0, m, task)
        counted = torch.cat([values, torch.ones_like(values[:, :1])], 1)
        # Not by `index_add_`: a GPU would add in any order, and the sums choose weights.
        table = self.reduce(torch.stack([torch.where((place == i)[:, None], counted, 0).sum(0) for i in range(m)]))
        self._rows = table if self._rows is None else self._rows + table
        rows, heard = Rows(self._rows[:, :-1]), self._rows[:, -1].cpu() > 0
        before = None if self.last else balancer.state_dict()
        losses = torch.ones(m, dtype=torch.float64) if self.losses is None else self.losses.to("cpu", torch.float64)
        here = heard if self.counts is None else heard & (self.counts.cpu() > 0)
        choice, self.report = balancer.choose(losses, here, rows)
        if before is not None:
            balancer.load_state_dict(before)
        else:
            self._rows = None
        factors = choice.weights[:, None] if choice.factors is None else choice.factors
        every = values.new_zeros(m + 1, factors.shape[1])
        present = torch.cat([self.report.absent == 0, torch.zeros(1, dtype=torch.bool)])
        every[present.to(every.device)] = factors.to(every)
        kept = torch.where(every[place] == 0, 0.0, gradient.float() * every[place])  # an absent task may be nan
        return kept.to(gradient.dtype)


class _Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, task: Tensor, hook: FeatureHook) -> Tensor:
        ctx.save_for_backward(features, task)
        ctx.hook = hook
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        features, task = ctx.saved_tensors
        return ctx.hook.change(features, task, gradient), None, None
