"""The pair of low-rank matrices that is added to a linear, and its initialisation (see `omni.lora.attach`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.lora.config import LoRAConfig


class LowRank(nn.Module):
    """One pair: [..., in] to [..., out]."""

    def __init__(self, inputs: int, outputs: int, config: LoRAConfig, device: torch.device | None = None) -> None:
        super().__init__()
        rank = config.rank
        self.scale, self.stabilized = config.scale, config.rank_stabilized
        self.a = nn.Parameter(torch.empty(rank, inputs, device=device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=device))
        self.dropout = nn.Dropout(config.dropout)
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as nn.Linear starts: the product is 0, the gradient of B is not

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def low(self, x: Tensor) -> Tensor:
        """scale * A dropout(x), [..., r]."""
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.a.dtype)
        return F.linear(self.dropout(x), self.a) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.low(x), self.b)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """The matrix that the pair adds to the weight, [out, in], in fp32."""
        return (self.b.float() @ self.a.float()) * self.scale
