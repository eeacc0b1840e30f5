"""Measures how long steps take, and reports the cause where one takes much longer than those before it."""

from __future__ import annotations

import os
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
        computed: seconds of CPU time that this process has used.
        load: processes that are running or waiting for a core of this machine.

    Attributes:
        recent: seconds of the last steps.
        recent_computed: seconds of CPU time of the last steps.
        unexplained: outliers without a part that explains them, of which the 1st, 2nd, 4th, 8th and so on are reported.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        graphs: Callable[[], int] = graphs_compiled,
        computed: Callable[[], float] = time.process_time,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
    ) -> None:
        self.clock, self.graphs, self.computed, self.load = clock, graphs, computed, load
        self.recent: deque[float] = deque(maxlen=100)
        self.recent_computed: deque[float] = deque(maxlen=100)
        self.kind: Hashable = None
        self.unexplained = 0
        self.begin()

    def begin(self) -> None:
        """Starts a step."""
        self.since, self.compiled, self.before = self.clock(), self.graphs(), self.computed()
        self.parts: dict[str, float] = {}

    def of_kind(self, kind: Hashable) -> None:
        """Says what kind of step this is: those of another kind take another time, and are forgotten."""
        if kind != self.kind:
            self.recent.clear()
            self.recent_computed.clear()
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
        computed = self.computed() - self.before
        usually = statistics.median(self.recent_computed) if self.recent_computed else computed
        self.recent.append(seconds)
        self.recent_computed.append(computed)
        if seconds <= LEAST or (usual is None and name != COMPILING) or seconds <= FACTOR * (usual or 0.0):
            return None
        cause, again = f"{name} took {longest:.1f} s", ""
        if 2 * longest < seconds - (usual or 0.0):
            self.unexplained += 1
            if self.unexplained & (self.unexplained - 1):  # no power of two
                return None
            cause = self._cause(seconds, computed, usually)
            again = f" (the {self.unexplained}th such step)" if self.unexplained > 2 else ""
        compared = "" if usual is None else f", {usual:.2g} s are usual"
        return f"step {step} took {seconds:.1f} s{compared}: {cause}{again}"

    def _cause(self, seconds: float, computed: float, usually: float) -> str:
        """Why a step took so many seconds, by the CPU time that it and the steps before it have `computed`."""
        if computed > 1.5 * usually or computed > 0.7 * seconds:
            return "the cause is unknown"
        load, there = self.load(), os.cpu_count() or 1
        if load > there:
            return f"other processes keep the machine busy (load {load:.1f} on {there} cores)"
        return f"this process computed for {computed:.1f} s of that, no more than usual, and waited otherwise"
