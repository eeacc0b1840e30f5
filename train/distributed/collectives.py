"""Names the collective that a process waits in, by what PyTorch's flight recorder keeps of the newest ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch._C._distributed_c10d as c10d

KEPT = "2000"
"""Collectives that are kept: NCCL's default, which gloo has to be told."""


def keep_collectives() -> None:
    """Have the newest collectives kept; called before a process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", KEPT)


def last_collective() -> str:
    """The collective that waits, such as `gloo:all_reduce of [1000], the group's number 12`; "" where none is known."""
    found = ""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's
        with suppress(AttributeError, RuntimeError, ValueError, TypeError):
            found = described(json.loads(getattr(c10d, name)()).get("entries", [])) or found
    return found


def described(entries: list[Mapping[str, Any]]) -> str:
    """The first of the recorder's entries that has started and not ended; the last one where the recorder does not see ends."""
    ends = any(entry.get("state") == "completed" for entry in entries)
    waiting = [entry for entry in entries if entry.get("state") != "completed"] if ends else entries[-1:]
    if not waiting:
        return ""
    entry = waiting[0]
    sizes = " and ".join(map(str, entry.get("input_sizes") or [])) or "nothing"
    return f"{entry.get('profiling_name', 'a collective')} of {sizes}, the group's number {entry.get('collective_seq_id', '?')}"
