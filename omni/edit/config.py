"""Settings of the editors: `finetune`, and `mend` with its transform."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from omni.errors import UserError

Sides = Literal["combined", "separate", "one_sided", "x_only", "delta_only"]
SIDES: tuple[Sides, ...] = ("combined", "separate", "one_sided", "x_only", "delta_only")


@dataclass(frozen=True)
class TransformConfig:
    """Shape of the hypernetwork's networks.

    Attributes:
        sides: one network for x and delta side by side (`combined`), one for each (`separate`), or one for a single side while
            the other stays as it is (`one_sided`: delta where a linear has more inputs than outputs, else x).
        hidden: layers before the last one.
        rank: largest rank of a layer's matrix.
        init: `id` starts as the identity and has residual layers, `xavier` is random and has none.
        norm: normalise by the running statistics.
    """

    sides: Sides = "combined"
    hidden: int = 1
    rank: int = 1920
    init: Literal["id", "xavier"] = "id"
    norm: bool = True

    def __post_init__(self) -> None:
        if self.sides not in SIDES:
            raise UserError(f"mend.sides {self.sides!r} is unknown; use one of {', '.join(SIDES)}")
        if self.init not in ("id", "xavier"):
            raise UserError(f"mend.init {self.init!r} is unknown; use id or xavier")
        if self.hidden < 0 or self.rank < 1:
            raise UserError(f"mend.hidden {self.hidden} and rank {self.rank} must be at least 0 and 1")

    def side(self, inputs: int, outputs: int) -> Literal["combined", "separate", "x", "delta"]:
        """The side or sides that are transformed for a linear of this shape."""
        if self.sides == "one_sided":
            return "delta" if inputs > outputs else "x"
        return {"x_only": "x", "delta_only": "delta"}.get(self.sides, self.sides)  # type: ignore[return-value]


@dataclass(frozen=True)
class MendConfig:
    """Settings of the hypernetwork.

    Attributes:
        transform: shape of its networks.
        shared: linears of one shape share a network.
        split: two transforms one after another (an encoder and a decoder), each with its own statistics.
        edit_lr: initial value of every linear's trained factor.
        c_edit, c_loc: weights of the two losses.
    """

    transform: TransformConfig = field(default_factory=TransformConfig)
    shared: bool = True
    split: bool = False
    edit_lr: float = 1e-4
    c_edit: float = 0.1
    c_loc: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.c_edit < math.inf and 0 <= self.c_loc < math.inf):
            raise UserError(f"mend.c_edit is {self.c_edit} and c_loc {self.c_loc}; they are numbers above 0 and at least 0")
        if not math.isfinite(self.edit_lr):
            raise UserError(f"mend.edit_lr is {self.edit_lr}; it must be a number")


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of the fine-tuning baseline.

    Attributes:
        bound: largest change: of every single weight (`linf`, dense changes only), or the norm of all changes together (`l2`).
        steps: most steps; it stops earlier when the loss falls below `enough`.
        rank: rank of the changes; None for dense ones.
        seed: of the initial factors of a low-rank change (whose product is zero).
    """

    norm: Literal["linf", "l2"] = "linf"
    bound: float = 1e-3
    lr: float = 5e-4
    steps: int = 50
    enough: float = 0.01
    rank: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.norm not in ("linf", "l2"):
            raise UserError(f"finetune.norm {self.norm!r} is unknown; use linf or l2")
        if not self.bound > 0 or not self.lr > 0 or self.steps < 1:
            raise UserError(f"finetune.bound {self.bound}, lr {self.lr} and steps {self.steps} must be above 0")
        if self.rank is not None and self.rank < 1:
            raise UserError(f"finetune.rank is {self.rank}; it must be at least 1, or null for dense changes")
        if self.rank is not None and self.norm == "linf":
            raise UserError("finetune.norm linf bounds single weights, which a change of low rank has none of; use l2")
