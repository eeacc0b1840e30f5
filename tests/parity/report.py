"""What two implementations say of the same, side by side: a table, and whether all of it agrees.

Each side is an iterator of names and values. A floating-point tensor is compared within a bound, everything else must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

BOUND = 1e-4
"""Largest difference, beside the largest number of the tensor."""


@dataclass
class Line:
    """A line of the report: what, how much of it, the largest difference, whether that will do (None: nothing was compared),
    and what there is to say."""

    what: str
    count: str
    difference: str
    good: bool | None
    note: str = ""


def compare(theirs_said: Iterator[tuple[str, Any]], ours_said: dict[str, Any]) -> Iterator[Line]:
    """Tensors by kind, everything else one by one."""
    tensors: dict[str, list[tuple[float, str]]] = {}
    numbers: dict[str, int] = {}
    for name, wanted in theirs_said:
        got = ours_said.pop(name, None)
        if isinstance(wanted, Tensor):
            kind = name if name.startswith("features") else name.rsplit(" ", 1)[0]
            alike = isinstance(got, Tensor) and got.shape == wanted.shape
            apart = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)) if alike else float("inf")
            tensors.setdefault(kind, []).append((apart if apart == apart else float("inf"), name))
            numbers[kind] = numbers.get(kind, 0) + wanted.numel()
        else:
            yield equal(name, wanted, got)
    for kind, found in tensors.items():
        largest, name = max(found)
        good = largest <= BOUND
        yield Line(kind, f"{len(found)} tensors, {numbers[kind]:,} numbers", f"{largest:.1e}", good, "" if good else name)
    for name in ours_said:
        yield Line(name, "", "-", False, "only ours says so")


def equal(name: str, wanted: Any, got: Any) -> Line:
    if not isinstance(wanted, list):
        return Line(
            name, str(wanted), "equal" if got == wanted else "differs", got == wanted, "" if got == wanted else f"ours: {got}"
        )
    count = f"{len(wanted)} x {len(wanted[0]) if wanted else 0}"
    if "tokens" in name:
        count = f"{len(wanted)} columns, {len(set(wanted))} of them different"
    elif "frames" in name or "levels" in name:
        count = f"{sum(map(len, wanted))} codes"
    elif "prompt" in name:
        count = f"{len(wanted)} rows of 8 x {len(wanted[0][0])}"
    if got == wanted:
        return Line(name, count, "equal", True)
    if got is None or len(got) != len(wanted):
        return Line(name, count, "differs", False, f"ours: {'nothing' if got is None else len(got)}")
    at = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
    return Line(name, count, "differs", False, f"first at {at}: {str(wanted[at])[:60]} ours: {str(got[at])[:60]}")


def show(title: str, lines: Iterator[Line]) -> bool:
    """Print a table; whether nothing of it is bad."""
    print(f"\n{title}")
    good = True
    for line in lines:
        verdict = "-" if line.good is None else "ok" if line.good else "MISS"
        print(f"  {verdict:<5}{line.what:<40}{line.count:<38}{line.difference:>9}  {line.note}", flush=True)
        good &= line.good is not False
    return good
