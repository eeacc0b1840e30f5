"""Measures how long steps take, and reports the cause where one takes much longer than those before it."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable

FACTOR, LEAST = 3.0, 1.0
"""A step is reported where it takes more than `FACTOR` times the median, and more than `LEAST` seconds."""
KNOWN = 5
"""Steps before there is a median; until then only steps that compile graphs are reported."""
COMPILING = "compiling"


def graphs_compiled() -> int:
    """Number of graphs that torch.compile has compiled in this process. Imports nothing: that alone takes over a second."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"].get("unique_graphs", 0))


class StepTimes:
    """Measures steps and named parts of them.

    Args:
        clock: seconds since any fixed time.
        graphs: number of graphs compiled so far.

    Attributes:
        recent: seconds of the last steps.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, graphs: Callable[[], int] = graphs_compiled) -> None:
        self.clock, self.graphs = clock, graphs
        self.recent: deque[float] = deque(maxlen=100)
        self.kind: Hashable = None
        self.begin()

    def begin(self) -> None:
        """Starts a step."""
        self.since, self.compiled = self.clock(), self.graphs()
        self.parts: dict[str, float] = {}

    def of_kind(self, kind: Hashable) -> None:
        """Says what kind of step this is: those of another kind take another time, and are forgotten."""
        if kind != self.kind:
            self.recent.clear()
            self.kind = kind

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds of this step to a named part."""
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def end(self, step: int) -> str | None:
        """Ends the step; returns a line where it is an outlier. Time until the next `begin` does not count, such as that in
        which the device finishes what the steps have queued on it."""
        seconds = self.clock() - self.since
        usual = statistics.median(self.recent) if len(self.recent) >= KNOWN else None
        self.add(COMPILING, seconds - sum(self.parts.values()) if self.graphs() > self.compiled else 0.0)
        name, longest = max(self.parts.items(), key=lambda part: part[1])
        self.recent.append(seconds)
        if seconds <= LEAST or (usual is None and name != COMPILING) or seconds <= FACTOR * (usual or 0.0):
            return None
        cause = f"{name} took {longest:.1f} s" if 2 * longest >= seconds - (usual or 0.0) else "the cause is unknown"
        compared = "" if usual is None else f", {usual:.2g} s are usual"
        return f"step {step} took {seconds:.1f} s{compared}: {cause}"
