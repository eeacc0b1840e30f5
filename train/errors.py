"""Errors of the launcher."""

from __future__ import annotations

from omni.errors import UserError


class Told(UserError):
    """A user's mistake that another process of the run reports: this one leaves in silence."""
