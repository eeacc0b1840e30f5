"""The gradients of a balanced step from losses whose graph allows several backward passes, by which `Balancer` is compared.

Dimensions: m tasks, N positions, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from train.balance.balancer import Balancer, BalanceReport
from train.balance.rows import Rows, alone, flat, mixed, put_gradients, summed

Losses = Tensor | Sequence[Tensor]


def backward(
    balancer: Balancer, losses: Losses, shared: Sequence[nn.Parameter], own: Sequence[nn.Parameter] = (),
    counts: Tensor | None = None, others: Sequence[Losses] = (), features: Sequence[Tensor] = (),
) -> BalanceReport:  # fmt: skip
    """Fills `grad` of the shared and the own parameters from losses [m].

    Args:
        others: losses of independent batches, where the method needs them.
        features: the shared representations [..., C] between the shared parameters and the losses, for level `features`.
    """
    shared, own = list(shared), list(own)
    values = summed(losses, alone)
    present = balancer.present(values, counts)
    if balancer.config.at == "loss":
        report = balancer.choose(values, counts)[1]
        learn = [*shared, *own]
        found = torch.autograd.grad(balancer.total(losses, report), learn, allow_unused=True)
        put_gradients(learn, flat(learn, found))
        return report
    if balancer.config.at == "features":
        return _through(balancer, losses, values, counts, present, shared, own, features)
    together, tables = [*shared, *own], []
    for which in (losses, *others):
        each = zip(which, present.tolist(), strict=True)
        tables.append(torch.stack([flat(together, _differentiate(loss, together, here)) for loss, here in each]))
    width = sum(p.numel() for p in shared)
    rows = [Rows(table[:, :width]) for table in tables]
    return balancer.combine(values, rows[0], shared, own, tables[0][:, width:], counts=counts, others=rows[1:])


def _through(
    balancer: Balancer, losses: Losses, values: Tensor, counts: Tensor | None, present: Tensor,
    shared: Sequence[nn.Parameter], own: Sequence[nn.Parameter], features: Sequence[Tensor],
) -> BalanceReport:  # fmt: skip
    """Takes rows from the features' gradients, then runs one backward of their combination into the shared parameters."""
    wanted, parts, tables, rests = [*features, *own], [], [], []
    for loss, here in zip(losses, present.tolist(), strict=True):
        found = _differentiate(loss, wanted, here)
        gradients = [torch.zeros_like(f) if g is None else g for f, g in zip(features, found, strict=False)]
        parts.append(gradients)
        tables.append(torch.cat([_channels(balancer, f, g) for f, g in zip(features, gradients, strict=True)]))
        rests.append(flat(own, found[len(features) :]) if own else torch.zeros(0))
    choice, report = balancer.choose(values, counts, Rows(torch.stack(tables)))
    here = report.absent == 0
    factors = choice.weights[:, None] if choice.factors is None else choice.factors
    chosen = [part for part, kept in zip(parts, here.tolist(), strict=True) if kept]
    combined, start = [torch.zeros_like(f) for f in features], 0
    for i, feature in enumerate(features):
        columns = slice(None) if choice.factors is None else slice(start, start + feature.shape[-1])
        start += feature.shape[-1]
        for gradients, factor in zip(chosen, factors, strict=True):
            combined[i] += gradients[i] * factor[columns].to(combined[i])
    put_gradients(shared, flat(shared, torch.autograd.grad(features, shared, combined, allow_unused=True)))
    if own:
        rest = torch.stack(rests)[here]
        put_gradients(own, mixed(torch.ones(len(rest)), rest))
    return report


def _channels(balancer: Balancer, features: Tensor, gradients: Tensor) -> Tensor:
    """A gradient of features [..., C] summed over positions, [C] fp32; for methods with `signs` times the features' signs."""
    signed = gradients.float() * features.detach().sign() if balancer.config.spec.signs else gradients.float()
    return signed.reshape(-1, features.shape[-1]).sum(0)


def _differentiate(loss: Tensor, by: Sequence[Tensor], present: bool) -> Sequence[Tensor | None]:
    """Gradients of one task's loss, whose graph is kept; None for each where the task is absent."""
    if not present or not loss.requires_grad:
        return [None] * len(by)
    return torch.autograd.grad(loss, by, retain_graph=True, allow_unused=True)
