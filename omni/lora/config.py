"""Configuration of a low-rank adapter (see `omni.lora.attach`)."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from omni.utils.configuration import configuration


@configuration
class LoRAConfig:
    """Settings of an adapter.

    Attributes:
        targets: names of the linears it adds to, as patterns (`omni.utils.arguments`); by default the decoder's blocks.
        rank: columns between A and B.
        alpha: strength; see the module's formula.
        dropout: share of the inputs that A does not see in training.
        rank_stabilized: divide alpha by the square root of the rank.
    """

    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("decoder.blocks.*",)
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rank_stabilized: bool = False

    def divisor(self, rank: int) -> float:
        """What alpha is divided by for a pair of that rank."""
        return math.sqrt(rank) if self.rank_stabilized else rank
