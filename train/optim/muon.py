"""Muon, which orthogonalises all matrices of one shape together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with all matrices of one shape orthogonalised in one batched product.

    The iteration runs in bf16, as torch's own, but on the CPU in fp32 unless `half`: most processors multiply that faster.
    A matrix and a transposed one of the same shape share a batch. Where `found_inf` is 1, a step changes neither weights nor
    state.
    """

    found_inf: Tensor | None = None
    half = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        keep = None if self.found_inf is None else 1 - self.found_inf.double()  # in float64, as exact as a Python number
        for group in self.param_groups:
            lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
            shrink = 1 - lr * decay * (1.0 if keep is None else keep)
            shapes: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                grad = p.grad if keep is None else torch.where(keep > 0, p.grad, buffer)
                buffer.lerp_(grad, 1 - momentum)
                update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
                shapes[min(p.shape), max(p.shape)].append((p, update))
            for pairs in shapes.values():
                wide = torch.stack([u if u.shape[0] <= u.shape[1] else u.mT for _, u in pairs])
                wide = orthogonalize(wide, group["ns_coefficients"], group["ns_steps"], group["eps"], self.half)
                if keep is not None:
                    wide = wide * keep
                for (p, _), u in zip(pairs, wide, strict=True):
                    p.mul_(shrink)
                    step = u if p.shape[0] <= p.shape[1] else u.mT
                    p.add_(step.to(p.dtype), alpha=-lr * update_scale(group["adjust_lr_fn"], p.shape))


def orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
    steps: int = 5,
    eps: float = 1e-7,
    half: bool = False,
) -> Tensor:
    """Run the quintic Newton-Schulz iteration X <- a X + (b G + c G^2) X with G = X X^T on matrices [N, m, n], m <= n.

    Brings every singular value near 1. Coefficients: K. Jordan, "Muon" (2024). fp32 on the CPU unless `half`, else bf16.
    """
    a, b, c = coefficients
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" and not half else torch.bfloat16)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def update_scale(rule: str | None, shape: Sequence[int]) -> float:
    """Factor of Muon's learning rate for a matrix [out, in]; see `OptimizerConfig.muon_scale`."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))
