"""Balances tasks by a bilevel method (`by_held_out.py`): weights are softmax(w), and w is trained by Adam.

Dimensions: m tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from train.balance.by_held_out import Batch, BilevelStep
from train.balance.chooser import BalanceReport, Chooser
from train.balance.rows import Rows, Sum, alone


class Bilevel(Chooser):
    """Balances the tasks by a bilevel method.

    A step is `update_weights(inner, outer, parameters, lr)`, then, for methods that are `linear`, one backward of the losses
    times the weights that it returned; others leave the whole gradient of the step in `grad`. Tasks that are absent from
    `inner` are left out.
    """

    BILEVEL = True

    def ahead(self) -> Tensor:
        """The current weights, [m]."""
        return self._logits().softmax(0)

    def update_weights(
        self,
        inner: Batch,
        outer: Batch,
        parameters: Sequence[nn.Parameter],
        lr: float,
        reduce: Sum = alone,
        run: Callable[[Tensor], None] = torch.Tensor.backward,
        settled: Callable[[], None] = lambda: None,
    ) -> BalanceReport:
        """Update the weights by one step; the report has the weights after it, and the outer gradients' norms and cosines.

        Args:
            lr: the optimizer's learning rate.
            run: calls backward; `grad` must hold the sum over processes after it. With plain backward, `reduce` sums.
            settled: called after a forward without backward, before parameters change: FSDP2 must free the root's whole ones.
        """
        step = BilevelStep(
            len(self.tasks), inner, outer, list(parameters), lr, self.ahead(), self.config.values, self.state, self.steps,
            reduce, run, settled,
        )  # fmt: skip
        with step.restored():
            return self._step(*self.config.kind.rule(step))

    def _logits(self) -> Tensor:
        m = len(self.tasks)
        return self.state.values.setdefault("logits", torch.full((m,), 1 / m, dtype=torch.float64))

    def _step(self, gradient: Tensor, present: Tensor, rows: Rows | None) -> BalanceReport:
        """Update the logits by Adam with their gradient [k], and report."""
        self._logits()
        given = self.given(torch.ones(len(present), dtype=torch.float64), present, rows, ())
        given.adam("logits", gradient, 1 / len(self.tasks), self.config.values["lr"])
        self.steps += 1
        self.absences += ~present
        m = len(present)
        norms, cosines = torch.full((m,), torch.nan), torch.full((m, m), torch.nan)
        if rows is not None:
            gramian = rows.gramian()
            norms = gramian.diagonal().clamp_min(0).sqrt()
            cosines = (gramian / (norms[:, None] * norms).clamp_min(1e-300)).clamp(-1, 1)
        weights = torch.where(present, self._logits().softmax(0), 0.0)
        return BalanceReport(weights, norms.float(), cosines.float(), (~present).long(), torch.zeros(m, dtype=torch.int64))
