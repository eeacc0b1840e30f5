"""Settings of MEND, with its transform."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from omni.utils.configuration import configuration

Sides = Literal["combined", "separate", "one_sided", "x_only", "delta_only"]


@configuration
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
    hidden: NonNegativeInt = 1
    rank: PositiveInt = 1920
    init: Literal["id", "xavier"] = "id"
    norm: bool = True


@configuration
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
    c_edit: PositiveFloat = 0.1
    c_loc: NonNegativeFloat = 1.0
