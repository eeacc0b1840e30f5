"""Calls the balance method with the present tasks of each step, keeps its state, and reports its choice.

Dimensions: m tasks, k of them present.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError
from train.balance.config import MAX_TASKS, BalanceConfig
from train.balance.given import Given, MethodChoice, State
from train.balance.rows import Rows


@dataclass
class BalanceReport:
    """Weights and gradient statistics of the tasks in a step; all on the CPU, without graph.

    Attributes:
        weights: [m]; 0 for an absent task, and for one whose row is zero. Of `graddrop`, the share of a task's gradient that
            passed; of `dbmtl` and `moco`, the weights of the smoothed gradients.
        norms: of the tasks' gradients, [m]; nan where there are none.
        cosines: between them, [m, m]; nan where there are none.
        absent: [m], 1 where a task was left out of this step.
        zero: [m], 1 where a task is present, but its row is zero, so that the method did not get it.
    """

    weights: Tensor
    norms: Tensor
    cosines: Tensor
    absent: Tensor
    zero: Tensor

    def figures(self, tasks: Sequence[str]) -> dict[str, float]:
        """Figures by name for a table: `weight/A1T1`, `norm/A1T1`, `cosine/A1T1/A1A2`, and `absent/A1T1` or `zero/A1T1` where
        a task was."""
        figures: dict[str, float] = {}
        for kind, values in (("weight", self.weights), ("norm", self.norms)):
            figures.update({f"{kind}/{t}": float(v) for t, v in zip(tasks, values, strict=True) if v == v})
        for i, one in enumerate(tasks):
            for j in range(i):
                if self.cosines[i, j] == self.cosines[i, j]:
                    figures[f"cosine/{tasks[j]}/{one}"] = float(self.cosines[i, j])
        for kind, flags in (("absent", self.absent), ("zero", self.zero)):
            figures.update({f"{kind}/{t}": 1.0 for t, flag in zip(tasks, flags, strict=True) if flag})
        return figures


class Chooser:
    """Calls the method in each step, and keeps its state between steps.

    Args:
        tasks: their names, in the order of the losses.

    Attributes:
        steps: taken so far.
        absences: how often each task was left out, [m].
        last: which tasks took part in the last step, [m] bool.
    """

    BILEVEL = False

    def __init__(self, config: BalanceConfig, tasks: Sequence[str]) -> None:
        if not 2 <= len(tasks) <= MAX_TASKS:
            raise UserError(f"balance.method {config.method} was given {len(tasks)} tasks; it needs 2 to {MAX_TASKS}")
        if config.kind.bilevel != self.BILEVEL:
            raise ValueError(f"{config.method} is made by `train.balance.build`, not by {type(self).__name__}")
        self.config, self.tasks = config, list(tasks)
        self.state = State(len(tasks))
        self.steps = 0
        self.absences = torch.zeros(len(tasks), dtype=torch.int64)
        self.last = torch.ones(len(tasks), dtype=torch.bool)

    def choose(
        self, losses: Tensor, counts: Tensor | None, rows: Rows | None = None, others: tuple[Rows, ...] = ()
    ) -> tuple[MethodChoice, BalanceReport]:
        """Call the method with the present tasks, and update its state.

        A present task whose row is zero (in all batches) does not influence the direction, and every direction suits it: the
        method does not get it, its weight is 0, and its state stays as it is.

        Args:
            losses: of the step, [m] float64 on the CPU.
            counts: targets of each task, [m]: one without any is absent; so is one whose loss or row is not finite.
            rows, others: of all tasks, [m, P].
        """
        present, m = self.present(losses, counts), len(self.tasks)
        norms, cosines, zero = torch.full((m,), torch.nan), torch.full((m, m), torch.nan), torch.zeros(m, dtype=torch.bool)
        if len(others) != (self.config.kind.batches - 1 if self.config.at == "parameters" else 0):
            raise ValueError(f"{self.config.method} takes {self.config.kind.batches} batches, got {1 + len(others)}")
        if rows is not None:
            gramian = rows.gramian()
            squares = torch.stack([table.diagonal().float() for table in (gramian, *(other.gramian() for other in others))])
            present = present & squares.isfinite().all(0)
            zero = present & (squares == 0).all(0)
            length = gramian.diagonal().clamp_min(0).sqrt()
            norms = torch.where(present, length, torch.nan).float()
            pairs = present[:, None] & present & (length[:, None] * length > 0)
            cosines = torch.where(pairs, gramian / (length[:, None] * length), torch.nan).float().clamp(-1, 1)
        self.last = asked = present & ~zero
        weights = torch.zeros(m, dtype=torch.float64)
        if asked.any():
            given = self.given(losses, asked, rows, others)
            with torch.no_grad():
                choice = self._ruled(given)
            weights[asked] = choice.weights.double()
            choice = choice if asked.equal(present) else choice.spread(asked[present])
        elif rows is not None and present.any():
            choice = MethodChoice(weights[present], direction=rows.values.new_zeros(rows.values.shape[1]))
        else:
            # Tasks have targets, but none has a finite loss or row: the direction is nan, so that the step is skipped.
            fill = torch.nan if counts is None or bool((counts > 0).any()) else 0.0
            empty = torch.zeros(0) if rows is None else rows.values.new_full((rows.values.shape[1],), fill)
            choice = MethodChoice(weights[:0], direction=empty)
        self.steps += 1
        self.absences += ~present
        return choice, BalanceReport(weights, norms, cosines, (~present).long(), zero.long())

    def _ruled(self, given: Given) -> MethodChoice:
        """What the method chooses; UserError, naming it, where it fails or chooses no weights."""
        name, m = self.config.method, len(given.losses)
        try:
            choice = self.config.kind.rule(given)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"balance method {name} failed with {type(error).__name__}: {error}") from error
        weights = getattr(choice, "weights", None)
        if not isinstance(choice, MethodChoice) or not isinstance(weights, Tensor) or weights.shape != (m,):
            raise UserError(f"balance method {name} returned {choice!r:.80}; it must return a MethodChoice with {m} weights")
        if not weights.isfinite().all() and given.losses.isfinite().all():
            raise UserError(f"balance method {name} returned weights {weights.tolist()} for losses {given.losses.tolist()}")
        return choice

    def given(self, losses: Tensor, present: Tensor, rows: Rows | None, others: tuple[Rows, ...]) -> Given:
        return Given(
            losses[present],
            Rows(torch.zeros(int(present.sum()), 0)) if rows is None else rows.take(present),
            tuple(other.take(present) for other in others),
            self.config.values,
            (self.config.seed * 1_000_003 + self.steps) % (1 << 62),
            present,
            self.state,
        )

    def present(self, losses: Tensor, counts: Tensor | None) -> Tensor:
        if len(losses) != len(self.tasks):
            raise ValueError(f"{len(losses)} losses were given for {len(self.tasks)} tasks")
        here = losses.isfinite()
        return here if counts is None else here & (counts.to("cpu") > 0)

    def state_dict(self) -> dict[str, Tensor]:
        """State as plain tensors; those of sharded gradients are this process's."""
        kept = {f"state/{name}": value.clone() for name, value in self.state.values.items()}
        pairs = {f"pairs/{name}": torch.tensor(True) for name in self.state.pairs}
        counts = {"steps": torch.tensor(self.steps), "absences": self.absences.clone(), "last": self.last.clone()}
        return {**counts, **kept, **pairs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["absences"]) != len(self.tasks):
            raise UserError(
                f"the stored balance is of {len(state['absences'])} tasks, this run has {len(self.tasks)} "
                f"({', '.join(self.tasks)}); go on with the same tasks, or say --resume restart"
            )
        self.steps, self.absences, self.last = int(state["steps"]), state["absences"].clone(), state["last"].clone()
        self.state = State(len(self.tasks))
        self.state.values = {k.removeprefix("state/"): v.clone() for k, v in state.items() if k.startswith("state/")}
        self.state.pairs = {k.removeprefix("pairs/") for k in state if k.startswith("pairs/")}
