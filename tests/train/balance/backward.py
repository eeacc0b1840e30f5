"""The gradients of a balanced step from losses whose graph allows several backward passes, by which `Balancer` is compared.

Dimensions: m tasks, N positions, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.balance.balancer import Balancer, BalanceReport, FeatureHook
from train.balance.rows import Rows, Sum, alone, flat, mixed, put_gradients, summed

Losses = Tensor | Sequence[Tensor]


class HookedNet(nn.Module):
    """Encoder, hook, decoder; every position belongs to a task. The losses [m] are shares of the means over all positions,
    whose tasks are `whole`."""

    def __init__(self, whole: Tensor, hook: FeatureHook | None = None, checkpointing: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        self.whole, self.hook, self.checkpointing = whole, hook, checkpointing
        g = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g)

    def forward(self, x: Tensor, task: Tensor | None = None) -> Tensor:
        task = self.whole if task is None else task
        features = self.features = checkpoint(self.encoder, x, use_reentrant=False) if self.checkpointing else self.encoder(x)
        hooked = features if self.hook is None else self.hook(features, task)
        out = checkpoint(self.decoder, hooked, use_reentrant=False) if self.checkpointing else self.decoder(hooked)
        loss = (out[:, 0].float() - 1).square()
        return torch.stack([loss[task == t].sum() / (self.whole == t).sum() for t in range(3)])


def backward(
    balancer: Balancer, losses: Losses, shared: Sequence[nn.Parameter], own: Sequence[nn.Parameter] = (),
    reduce: Sum = alone, counts: Tensor | None = None, others: Sequence[Losses] = (), features: Sequence[Tensor] = (),
) -> BalanceReport:  # fmt: skip
    """Fills `grad` of the shared and the own parameters from losses [m]; gradients are summed over processes here.

    Args:
        others: losses of independent batches, where the method needs them.
        features: the shared representations [..., C] between the shared parameters and the losses, for level `features`.
    """
    shared, own = list(shared), list(own)
    values = summed(losses, reduce)
    present = balancer.present(values, counts)
    if balancer.config.at == "loss":
        report = balancer.choose(values, counts)[1]
        learn = [*shared, *own]
        found = torch.autograd.grad(balancer.total(losses, report), learn, allow_unused=True)
        put_gradients(learn, reduce(flat(learn, found)))
        return report
    if balancer.config.at == "features":
        return _through(balancer, losses, values, counts, present, shared, own, features, reduce)
    together, tables = [*shared, *own], []
    for which in (losses, *others):
        each = zip(which, present.tolist(), strict=True)
        tables.append(reduce(torch.stack([flat(together, _differentiate(loss, together, here)) for loss, here in each])))
    width = sum(p.numel() for p in shared)
    rows = [Rows(table[:, :width]) for table in tables]
    return balancer.combine(values, rows[0], shared, own, tables[0][:, width:], counts=counts, others=rows[1:])


def _through(
    balancer: Balancer, losses: Losses, values: Tensor, counts: Tensor | None, present: Tensor,
    shared: Sequence[nn.Parameter], own: Sequence[nn.Parameter], features: Sequence[Tensor], reduce: Sum,
) -> BalanceReport:  # fmt: skip
    """Takes rows from the features' gradients, then runs one backward of their combination into the shared parameters."""
    wanted, parts, tables, rests = [*features, *own], [], [], []
    for loss, here in zip(losses, present.tolist(), strict=True):
        found = _differentiate(loss, wanted, here)
        gradients = [torch.zeros_like(f) if g is None else g for f, g in zip(features, found, strict=False)]
        parts.append(gradients)
        tables.append(torch.cat([_channels(balancer, f, g) for f, g in zip(features, gradients, strict=True)]))
        rests.append(flat(own, found[len(features) :]) if own else torch.zeros(0))
    choice, report = balancer.choose(values, counts, Rows(reduce(torch.stack(tables))))
    here = report.absent == 0
    factors = choice.weights[:, None] if choice.factors is None else choice.factors
    chosen = [part for part, kept in zip(parts, here.tolist(), strict=True) if kept]
    combined, start = [torch.zeros_like(f) for f in features], 0
    for i, feature in enumerate(features):
        columns = slice(None) if choice.factors is None else slice(start, start + feature.shape[-1])
        start += feature.shape[-1]
        for gradients, factor in zip(chosen, factors, strict=True):
            combined[i] += gradients[i] * factor[columns].to(combined[i])
    put_gradients(shared, reduce(flat(shared, torch.autograd.grad(features, shared, combined, allow_unused=True))))
    if own:
        rest = reduce(torch.stack(rests))[here]
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
