"""Computes the factors of a loss's gradient at named linears: inputs x and output gradients delta, token by token.

Dimensions: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from omni.edit.linears import find_linears
from omni.errors import UserError


class Factors(NamedTuple):
    """x [N, I] and delta [N, O]: the gradient of the weight [O, I] is delta.T @ x."""

    x: Tensor
    delta: Tensor


def gradient_factors(
    model: nn.Module, linears: Iterable[str], batch: Any, loss_of: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Factors]:
    """Factors of the gradient of `loss_of(model, batch)`, without graph; no parameter's `grad` is touched.

    The base may be frozen, sharded or quantised, and its blocks recomputed. A linear that is called several times gives the
    tokens of all its calls. Sharded processes must be given the same batch.

    Raises:
        UserError: a name is no linear of the model, or the loss does not depend on its output.
    """
    found = find_linears(model, linears)
    calls: list[tuple[str, Tensor, Tensor]] = []
    recording = True
    with ExitStack() as stop, torch.enable_grad():
        for name, part in found.items():

            def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor, name: str = name) -> None:
                if not out.requires_grad:  # a frozen base: the graph starts here, and again where it is recomputed
                    out.requires_grad_()
                if recording:
                    x = args[0] if args else next(iter(kwargs.values()))
                    calls.append((name, x.detach(), out))

            stop.callback(part.register_forward_hook(record, with_kwargs=True).remove)
        loss = loss_of(model, batch)
        recording = False
        grads: tuple[Tensor | None, ...] = ()
        if calls and loss.requires_grad:
            grads = torch.autograd.grad(loss, [out for _, _, out in calls], allow_unused=True)
    pairs = [(name, x, grad) for (name, x, _), grad in zip(calls, grads, strict=bool(grads)) if grad is not None]
    factors = {}
    for name in found:
        mine = [(x.reshape(-1, x.shape[-1]), grad.detach().reshape(-1, grad.shape[-1])) for at, x, grad in pairs if at == name]
        if not mine:
            raise UserError(
                f"the loss does not depend on what {name} puts out: it may be used by its weight instead of being called; "
                "choose another linear"
            )
        factors[name] = Factors(torch.cat([x for x, _ in mine]), torch.cat([delta for _, delta in mine]))
    return factors
