"""Gradients of the tasks as the rows of a matrix, by shared parameters or shared features; moved from and to `grad`.

Dimensions: m tasks, P values that this process holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_PIECES = 16

Sum = Callable[[Tensor], Tensor]
"""Sums a tensor over processes (in place or not); returns the tensor itself where there is one process."""


def alone(values: Tensor) -> Tensor:
    """Return the tensor: its sum over processes where there is one process."""
    return values


def summed(losses: Tensor | Sequence[Tensor], reduce: Sum) -> Tensor:
    """Sum the losses [m] over processes: the step's losses, float64 on the CPU, without graph."""
    values = losses.detach().clone() if isinstance(losses, Tensor) else torch.stack([x.detach() for x in losses])
    return reduce(values.to(torch.promote_types(values.dtype, torch.float32))).to("cpu", torch.float64)


@dataclass
class Rows:
    """One gradient per task, as the rows of a matrix.

    Attributes:
        values: [m, P], of at least fp32.
        total: sums a statistic over the processes that hold other values (shards) of the same rows; `alone` where each process
            holds all values.
    """

    values: Tensor
    total: Sum = alone

    def __len__(self) -> int:
        return len(self.values)

    def gramian(self, other: Rows | None = None) -> Tensor:
        """Compute the inner products [m, m] of the rows with each other, or with those of another batch; float64 on the CPU."""
        right = self if other is None else other
        found = torch.zeros(len(self), len(right), dtype=_exact(self.values), device=self.values.device)
        for columns in _pieces(self.values):
            piece = self.values[:, columns].to(found)
            found += piece @ (piece if right is self else right.values[:, columns].to(found)).T
        return self.statistic(found)

    def statistic(self, values: Tensor) -> Tensor:
        """Complete a sum over this process's values by those of the other processes; float64 on the CPU."""
        return self.total(values).to("cpu", torch.float64)

    def norms(self) -> Tensor:
        """Norms of the rows, [m] float64 on the CPU."""
        return self.statistic(self.values.square().sum(1)).sqrt()

    def take(self, present: Tensor) -> Rows:
        """Select the rows of the tasks in `present`, [m] bool."""
        return self if bool(present.all()) else Rows(self.values[present.to(self.values.device)], self.total)

    def times(self, weights: Tensor) -> Rows:
        """Multiply every row by its weight [m]."""
        return Rows(self.values * weights.to(self.values)[:, None], self.total)


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Sum rows [m, P] times their weights [m] to [P]; in float64, as large weights may cancel each other."""
    weights = weights.to(values.device, _exact(values))
    found = values.new_empty(values.shape[1])
    for columns in _pieces(values):
        found[columns] = (weights @ values[:, columns].to(weights)).to(found)
    return found


def _exact(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64


def _pieces(values: Tensor) -> Iterator[slice]:
    """Slices of the columns of [m, P], so that a copy of one slice in another dtype is small."""
    width = max(-(-values.shape[1] // _PIECES), 4096)
    return (slice(start, start + width) for start in range(0, values.shape[1], width))


def is_sharded(parameters: Iterable[Tensor]) -> bool:
    return any(isinstance(p, DTensor) for p in parameters)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """Concatenate gradients to one vector [P], of at least fp32; zeros where a parameter has none."""
    parts = []
    for p, g in zip(parameters, gradients, strict=True):
        given = torch.zeros_like(local(p)) if g is None else local(g).detach()
        parts.append(given.to(torch.promote_types(given.dtype, torch.float32)).flatten())
    return torch.cat(parts)


def take_gradients(parameters: Sequence[nn.Parameter], scale: float = 1.0) -> Tensor:
    """Take the parameters' `grad` away, and return it divided by `scale` as one vector [P]."""
    row = flat(parameters, [p.grad for p in parameters])
    for p in parameters:
        p.grad = None
    return row if scale == 1.0 else row / scale


@torch.no_grad()
def put_gradients(parameters: Sequence[nn.Parameter], vector: Tensor, scale: float = 1.0) -> None:
    """Add a vector [P] times `scale` to the parameters' `grad`."""
    start = 0
    for p in parameters:
        own = local(p)
        part = vector[start : start + own.numel()].view_as(own).to(own.dtype) * scale
        start += own.numel()
        if p.grad is not None:
            local(p.grad).add_(part)
        elif isinstance(p, DTensor):
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        else:
            p.grad = part.clone()
    if start != len(vector):
        raise ValueError(f"a gradient of {len(vector)} values was given to parameters of {start}")
