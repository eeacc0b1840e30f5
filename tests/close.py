from __future__ import annotations

import torch


def assert_near(ours: torch.Tensor, wanted: torch.Tensor, relative: float = 1e-5, what: str = "") -> None:
    """The difference is small beside the tensor as a whole (single entries may cancel to almost nothing)."""
    assert ours.shape == wanted.shape, f"{what}: {tuple(ours.shape)} instead of {tuple(wanted.shape)}"
    ours, wanted = ours.detach(), wanted.detach()
    apart = float((ours.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-12))
    assert apart <= relative, f"{what}: relative difference {apart:.2e} over {relative:.0e}"
