"""The baseline of editing: fine-tuning on one correction with a bound on the change (Zhu et al. 2020, arXiv 2012.00363).

Deltas are trained in activation space, dense or of low rank, so that the base stays untouched and the outcome is an edit
like any other.

Dimensions: R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from omni.edit.config import FinetuneConfig
from omni.edit.deltas import Delta, Edits, edited, find_linears, mlp_linears, shape_of, weight_of
from omni.errors import UserError


def finetune(
    model: nn.Module,
    batch: Any,
    loss_of: Callable[[nn.Module, Any], Tensor],
    linears: Iterable[str] | None = None,
    config: FinetuneConfig | None = None,
) -> Edits:
    """Adam on changes of the linears (by default those of `mlp_linears`), projected after each step. Returns the edit,
    without graph, signed for the model; no weight and no parameter's `grad` is touched. UserError: a name is no linear of
    the model, or the loss depends on none of them."""
    config = config or FinetuneConfig()
    parts = find_linears(model, mlp_linears(model) if linears is None else linears)
    random = torch.Generator().manual_seed(config.seed)
    edits = Edits({name: _nothing(part, config.rank, random) for name, part in parts.items()})
    learning = [tensor for delta in edits.deltas.values() for tensor in (delta.a, delta.b) if tensor is not None]
    optimizer = torch.optim.Adam(learning, lr=config.lr)
    reached = False
    for _ in range(config.steps):
        with torch.enable_grad(), edited(model, edits):
            loss = loss_of(model, batch)
            if float(loss.detach()) < config.enough:
                reached = True
                break
            if not loss.requires_grad:  # this forward pass used none of the linears
                continue
            loss.backward(inputs=learning)
        reached = reached or any(tensor.grad is not None for tensor in learning)
        optimizer.step()
        optimizer.zero_grad()
        project(list(edits.deltas.values()), config.norm, config.bound)
    if not reached:
        raise UserError(f"the loss does not depend on what {', '.join(parts)} put out; choose other linears or tasks")
    return edits.map(lambda change: change.detach().clone()).signed(model)


def _nothing(part: nn.Module, rank: int | None, random: torch.Generator) -> Delta:
    """Initialises a delta that changes nothing yet."""
    (inputs, outputs), device = shape_of(part), weight_of(part).device
    if rank is None:
        return Delta(torch.zeros(inputs, outputs, device=device, requires_grad=True))
    a = torch.randn(rank, inputs, generator=random) / inputs**0.5
    return Delta(torch.zeros(rank, outputs, device=device, requires_grad=True), a.to(device).requires_grad_())


@torch.no_grad()
def project(deltas: Sequence[Delta], norm: Literal["linf", "l2"], bound: float) -> None:
    """Projects changes to the nearest ones within the bound, in place; those of low rank (l2 alone) by scaling their b."""
    if norm == "linf":
        for delta in deltas:
            delta.b.clamp_(-bound, bound)
        return
    # |a.T b|^2 = sum of (a a.T) * (b b.T)
    squares = [d.b.double().square() if d.a is None else (d.a @ d.a.T) * (d.b @ d.b.T) for d in deltas]
    square = sum(float(each.sum()) for each in squares)
    if square > bound**2:
        for delta in deltas:
            delta.b.mul_(bound / square**0.5)
