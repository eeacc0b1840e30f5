"""The distance of an encoder's frames from those of another one, by which it is distilled and judged."""

from __future__ import annotations

from torch import Tensor


def frame_distances(heard: Tensor, taught: Tensor) -> Tensor:
    """|heard - taught|^2 / |taught|^2 of each of T frames [T, D], in fp32: 0 where they are equal, 1 for zeros."""
    heard, taught = heard.float(), taught.float()
    return (heard - taught).square().sum(1) / taught.square().sum(1).clamp_min(1e-6)
