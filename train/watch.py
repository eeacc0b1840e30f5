"""The graph guard around the steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from omni.diagnostics import Finding, GraphError, Guard, report
from omni.errors import UserError
from train.feed import Step


class Watch:
    """Runs steps under a guard.

    Args:
        idle: parameters that do not learn at that share of the budget.
    """

    def __init__(
        self, objective: nn.Module, optimizer: torch.optim.Optimizer, idle: Callable[[float], Iterable[nn.Parameter]]
    ) -> None:
        self.guard, self.idle = Guard(objective, optimizer), idle

    def step(
        self,
        number: int,
        step: Step,
        progress: float,
        train: Callable[[Step], None],
        say: Callable[[str], None] = lambda text: None,
        trace: bool = False,
    ) -> list[Finding]:
        """Take a step; what is new of what the guard finds is said, and returned.

        Args:
            number: of the step, from 1.
            progress: share of the budget that is used.
            train: takes the step.
            trace: see every operation.

        Raises:
            UserError: autograd failed; with the diagnosis.
        """
        guard = self.guard
        guard.idle = {id(p): p for p in self.idle(progress)}
        known = {finding.key for finding in guard.findings}
        try:
            guard.run(lambda: train(step), step.batches, trace=trace)
        except GraphError as error:
            raise UserError(f"step {number}: {error}") from error
        new = [finding for finding in guard.findings if finding.key not in known]
        if new:
            say(f"guard, step {number}:\n{report(new)}")
        return new
