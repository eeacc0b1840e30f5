"""Compares a checkpoint's configuration with that of this start, and refuses differences in keys that must not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni.errors import UserError

IGNORED_KEYS = (
    "run_folder", "resume", "fabric.accelerator", "fabric.devices", "fabric.num_nodes", "fabric.strategy", "fabric.replicas",
    "fabric.tensor_parallel", "fabric.checkpointing", "fabric.compile", "fabric.deterministic", "fabric.timeout_seconds",
    "checkpoint", "validation", "log", "data.workers", "data.prefetch", "data.cache",
    "data.broken_limit", "guard", "objective.chunk", "model.tokenizer", "model.codec_folder", "model.init_from",
)  # fmt: skip
"""Keys that may differ between the starts of a run: they do not change the training but for rounding, or they are paths."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[tuple[str, Any, Any]]:
    """List the keys whose values differ, with the old and the new value; keys in `IGNORED_KEYS` are left out."""
    found: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys((*old, *new)):
        key = f"{where}{name}"
        a, b = old.get(name), new.get(name)
        if key in IGNORED_KEYS or a == b:
            continue
        if isinstance(a, Sequence) and isinstance(b, Sequence) and len(a) == len(b) and not isinstance(a, str):
            a, b = ({f"[{i}]": value for i, value in enumerate(items)} for items in (a, b))
            found += differences(a, b, key)
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{key}.")
        else:
            found.append((key, a, b))
    return found


def check_resumable(folder: Path, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], extend: bool) -> None:
    """Refuse to resume the run in `folder` with another configuration or other data: UserError naming the first difference.

    Args:
        before, now: configuration, and sizes of the data, as the run was started and at this start.
        extend: the budget may differ.
    """
    found = [entry for pair in zip(before, now, strict=True) for entry in differences(*pair)]
    budget = [(old, new) for key, old, new in found if key.startswith("budget.")]
    larger = all(new is None or (old is not None and new > old) for old, new in budget)
    for key, old, new in found:
        if extend and key.startswith("budget."):
            continue
        way = "--resume extend (go on with a larger budget), " if key.startswith("budget.") and larger else ""
        started = "without a limit" if old is None and key.startswith("budget.") else f"with {brief(old)}"
        raise UserError(
            f"{key} is {brief(new)}, but the run in {folder} was started {started}; set it back, choose another "
            f"--run_folder, or say {way}--resume restart (start over) or --resume force (go on all the same)"
        )


def brief(value: Any) -> str:
    """Format a value for an error message, in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
