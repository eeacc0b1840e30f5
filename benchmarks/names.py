"""Names of the tables of `omni-train bench`."""

from __future__ import annotations

BALANCED = ("uncertainty", "dwa", "stch", "famo", "mgda:features")
"""Methods of the balance's table, each at its first level or at the one after a colon."""
SECTIONS = ("objective", "step", "data", "balance", "guard", "precision", "checkpoint", "convert", "prepare", "reading")
OF_RECIPE = ("data", "balance", "guard", "precision", "checkpoint")
"""Tables that need the configuration of a run."""
