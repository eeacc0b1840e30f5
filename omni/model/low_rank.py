"""One low-rank addition to a linear, and how it is made (see `omni.model.lora`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.errors import UserError


@dataclass(frozen=True)
class LoRAConfig:
    """An adapter before it has weights.

    Attributes:
        targets: names of the linears it adds to, as patterns (`omni.patterns`); by default the decoder's blocks.
        rank: columns between A and B.
        alpha: strength; see the module's formula.
        dropout: share of the inputs that A does not see in training.
        rank_stabilized: divide alpha by the square root of the rank.
    """

    targets: tuple[str, ...] = ("decoder.blocks.*",)
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        if not self.targets or isinstance(self.targets, str):
            given = f"the text {self.targets!r}" if self.targets else "empty"
            raise UserError(f"lora.targets is {given}; give a list of names of linears, such as ['decoder.blocks.*']")
        if self.rank < 1:
            raise UserError(f"lora.rank is {self.rank}; it must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lora.alpha is {self.alpha}; it must be a number above 0")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout is {self.dropout}; it must lie from 0 to below 1")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class LowRank(nn.Module):
    """One pair: [..., in] to [..., out]."""

    def __init__(self, inputs: int, outputs: int, config: LoRAConfig, device: torch.device | None = None) -> None:
        super().__init__()
        rank = config.rank
        self.scale, self.stabilized = config.scale, config.rank_stabilized
        self.a = nn.Parameter(torch.empty(rank, inputs, device=device))
        self.b = nn.Parameter(torch.zeros(outputs, rank, device=device))
        self.dropout = nn.Dropout(config.dropout)
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as nn.Linear begins: the product is 0, the gradient of B is not

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
        """What it adds to the weight, [out, in], in fp32."""
        return (self.b.float() @ self.a.float()) * self.scale
