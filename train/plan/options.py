"""Checks the options of a plan."""

from __future__ import annotations

from omni.errors import UserError


def check_options(devices: int | None = None, gpu_gib: float | None = None, mfu: float = 0.35) -> None:
    """Refuses (UserError) numbers that no machine has."""
    if devices is not None and devices < 1:
        raise UserError(f"--devices is {devices}; it must be at least 1")
    if gpu_gib is not None and gpu_gib <= 0:
        raise UserError(f"--gpu_gib is {gpu_gib:g}; it must be above 0")
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu is {mfu:g}; it must lie between 0 and 1")
