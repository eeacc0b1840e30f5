"""The baseline: fine-tuning on one correction, held near the base by a bound on the change (Zhu et al. 2020, arXiv 2012.00363).

What learns are dense deltas in activation space, so that the base stays untouched and the outcome is an edit like any other.

Dimensions: I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from omni.edit.deltas import Delta, Edits, edited
from omni.edit.linears import find_linears, mlp_linears, shape_of, weight_of
from omni.errors import UserError


@dataclass(frozen=True)
class FinetuneConfig:
    """How far and how fast.

    Attributes:
        bound: largest change: of every single weight (`linf`), or the norm of all changes together (`l2`).
        steps: at most; it stops when the loss falls below `enough`.
    """

    norm: Literal["linf", "l2"] = "linf"
    bound: float = 1e-3
    lr: float = 5e-4
    steps: int = 50
    enough: float = 0.01

    def __post_init__(self) -> None:
        if self.norm not in ("linf", "l2"):
            raise UserError(f"finetune.norm {self.norm!r} is unknown; use linf or l2")
        if self.bound <= 0 or self.lr <= 0 or self.steps < 1:
            raise UserError(f"finetune.bound {self.bound}, lr {self.lr} and steps {self.steps} must be above 0")


def finetune(
    model: nn.Module,
    batch: Any,
    loss_of: Callable[[nn.Module, Any], Tensor],
    linears: Iterable[str] | None = None,
    config: FinetuneConfig | None = None,
) -> Edits:
    """Adam on dense changes of the linears (by default those of `mlp_linears`), projected after each step.

    Returns:
        the edit, without graph, signed for the model; no weight and no parameter's `grad` is touched.

    Raises:
        UserError: a name is no linear of the model.
    """
    config = config or FinetuneConfig()
    found = find_linears(model, mlp_linears(model) if linears is None else linears)
    changes = {}
    for name, part in found.items():
        changes[name] = torch.zeros(shape_of(part), device=weight_of(part).device, requires_grad=True)  # [I, O]
    edits = Edits({name: Delta(change) for name, change in changes.items()})
    optimizer = torch.optim.Adam(changes.values(), lr=config.lr)
    for _ in range(config.steps):
        with torch.enable_grad(), edited(model, edits):
            loss = loss_of(model, batch)
            if float(loss) < config.enough:
                break
            loss.backward(inputs=list(changes.values()))
        optimizer.step()
        optimizer.zero_grad()
        project(list(changes.values()), config.norm, config.bound)
    return edits.map(lambda change: change.detach().clone()).signed(model)


@torch.no_grad()
def project(changes: list[Tensor], norm: Literal["linf", "l2"], bound: float) -> None:
    """The nearest changes within the bound, in place."""
    if norm == "linf":
        for change in changes:
            change.clamp_(-bound, bound)
        return
    size = sum(float(change.double().square().sum()) for change in changes) ** 0.5
    if size > bound:
        for change in changes:
            change.mul_(bound / size)
