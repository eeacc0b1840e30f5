"""Measures at what rate rows of streams are read, encoded and made examples, and says whether a run can wait for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from omni.config import ModelConfig
from omni.errors import UserError
from train.config.run import FitConfig
from train.data.build import build_pipeline
from train.data.sources.shares import weight_at
from train.plan.pace import tools

SECONDS, MOST = 2.0, 200
"""Time for the measurements of all streams, besides opening them, and most rows of a stream."""


@dataclass(frozen=True)
class StreamPace:
    """Rows of a stream a second.

    Attributes:
        one: that a core makes examples of.
        needed: by the run; None where its time is not known.
        workers: data workers on all devices.
    """

    one: float
    needed: float | None
    workers: int

    def line(self, source: str, each: int) -> str:
        """What was measured and what is advised; `each` is the number of data workers of a process."""
        made = f"{source}: a core reads and encodes {self.one:.3g} rows a second"
        if self.needed is None:
            return f"{made}; whether that keeps up is unknown: give --try, or --gpu NAME"
        of = f"the run needs {self.needed:.3g}, and has {self.workers} data worker{'s' * (self.workers != 1)}"
        if self.one * self.workers >= self.needed:
            return f"{made}; {of}: it keeps up"
        more = math.ceil(self.needed / self.one * each / self.workers)
        return (
            f"{made}; {of}: it DOES NOT KEEP UP; run `omni-train data prepare` once and train on its rows, or set data.workers "
            f"to {more} where there are as many cores for each process"
        )


def advise_streams(
    config: FitConfig, shape: ModelConfig, examples: float | None, seconds: float | None, world: int
) -> list[str]:
    """A line for each stream whose rows can be read here.

    Args:
        examples, seconds: of a step; None where they are not known.
        world: number of processes that train.
    """
    data = config.data
    streams = [i for i, source in enumerate(data.sources) if source.kind == "stream"]
    now = [weight_at(weight, 0) for weight in data.weights]
    lines, each = [], max(1, data.workers)
    for i in streams:
        try:
            one = measure_stream(config, shape, i, SECONDS / len(streams))
        except (UserError, OSError):  # which is told as the reason why the run is refused
            continue
        needed = examples / seconds * now[i] / sum(now) if examples and seconds else None
        lines.append(StreamPace(one, needed, each * world).line(f"data.sources.{i} ({data.sources[i].path})", each))
    return lines


def measure_stream(config: FitConfig, shape: ModelConfig, number: int, seconds: float) -> float:
    """Rows of a stream a second that this process makes examples of; UserError where they cannot be read."""
    tokenizer, codec = tools(config.model, shape)
    source = replace(config.data.sources[number], shuffle=1, weight=1.0)
    data = replace(config.data, sources=(source,), broken="skip", packing=replace(config.data.packing, too_long="skip"))
    pipeline = build_pipeline(data, shape, tokenizer, codec, config.objective.encoder_alone)
    pipeline.fetch(0)  # opens the shard, and imports
    start, rows = time.perf_counter(), 0
    while rows < MOST and (time.perf_counter() < start + seconds or not rows):
        rows += 1
        pipeline.fetch(rows)
    return rows / max(time.perf_counter() - start, 1e-9)
