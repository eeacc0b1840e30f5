"""Figures of an engine: how long steps take, and whether sound is there when its listener needs it; and what a step costs on
this machine by its number of rows: measured at a start, kept, and read by engines that never measured.

A step is measured as an engine takes it: a runner's step of n rows, while the codec turns a frame of each of n answers into
sound in another thread. Rows stand in the middle of the cache. There is no encoder, prefill, event or listener in it.

What was measured is kept in the user's cache folder, in a file for each processor and PyTorch, by device, threads, number
format, kernels, model and codec.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from omni.codec.base import AudioCodec
from omni.config import to_dict
from omni.cpu import is_int8
from omni.errors import UserError
from omni.files import cache_folder, write_json
from omni.generate.options import GREEDY
from omni.generate.rows import Start
from omni.generate.runner import Runner
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import machine

LOG = logging.getLogger(__name__)

R = TypeVar("R")

STEPS = 8
"""Steps of each number of rows, after two that are not counted."""

MOST = 64
"""Rows up to which an engine is measured that has no fixed number of slots."""

LENGTH = 512
"""Positions of a row for measurements, where an engine has no length of its own."""


class StepCost(NamedTuple):
    """Seconds until a step and its sound are done (median), and CPU seconds of all threads (mean)."""

    seconds: float
    cpu: float


class StepCosts(dict[int, StepCost]):
    """Costs of a step by its number of rows."""

    def at(self, rows: float) -> StepCost:
        """The cost of a step of that many rows, between and beyond the measured ones in a line; more rows cost no less."""
        known = sorted(self)
        costs = np.maximum.accumulate([self[number] for number in known])  # [N, 2]
        if rows <= known[-1]:
            return StepCost(*(float(np.interp(rows, known, column)) for column in costs.T))
        number, cost = (known[-2], costs[-2]) if len(known) > 1 else (0, 0.0)
        beyond = (rows - known[-1]) / (known[-1] - number)
        return StepCost(*(costs[-1] + beyond * (costs[-1] - cost)).tolist())


def powers_to(most: int) -> list[int]:
    """1, 2, 4 ... and the number itself."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


# --- measuring ------------------------------------------------------------------------------------------------------


def measure_steps(runner: Runner, codec: AudioCodec | None, rows: Iterable[int], most: float | None = None) -> StepCosts:
    """Measure steps of these numbers of rows, from the lowest; on a GPU their graphs are captured besides.

    Args:
        runner: without answers under way; it grows where it has fewer rows.
        most: seconds; the first number of rows that takes longer is the last.
    """
    costs = StepCosts()
    with ThreadPoolExecutor(1, "omni-measure") as beside:
        for number in sorted(set(rows)):
            if number > len(runner.rows):
                runner.grow(number, runner.length)
            middle = max(0, min(runner.length // 2, runner.length - STEPS - 4))
            starts = [Start(True, True, middle, (GREEDY,) * len(runner.layout))] * number
            runner.warm_up(starts)
            costs[number] = _measure(runner, codec, starts, beside)
            if most is not None and costs[number].seconds > most:
                break
    return costs


@torch.inference_mode()
def _measure(runner: Runner, codec: AudioCodec | None, starts: Sequence[Start], beside: ThreadPoolExecutor) -> StepCost:
    number, norm = len(starts), runner.model.decoder.norm.weight
    hidden = norm.new_zeros(number, 1, norm.shape[0])
    rows = runner.begin(range(number), Hidden(hidden, hidden), starts)
    batch = None if codec is None else codec.batch()
    streams = [batch.open() for _ in rows] if batch is not None else []
    generator = torch.Generator().manual_seed(0)  # a codec may take longer for sound than for silence
    sizes = () if codec is None else codec.codebook_sizes
    taken, cpu = [], 0.0
    try:
        runner.results(flush=True)
        for step in range(2 + STEPS):
            for row in rows:  # what garbage says is not to end them
                row.done, row.needs_text, row.needs_audio = False, True, True
            codes = [torch.randint(size, (number, 1), generator=generator) for size in sizes]
            start, used = time.perf_counter(), time.process_time()
            sound = None if batch is None else beside.submit(batch.push, streams, torch.stack(codes, dim=1))
            runner.step(rows)
            runner.results(flush=True)
            if sound is not None:
                sound.result()
            if step >= 2:
                taken.append(time.perf_counter() - start)
                cpu += time.process_time() - used
    finally:
        for row in rows:
            runner.leave(row)
        runner.results(flush=True)
    return StepCost(statistics.median(taken), cpu / STEPS)


# --- what is kept ---------------------------------------------------------------------------------------------------


def measured_of(model: SpeechModel, codec: AudioCodec | None) -> str:
    """Key of a measurement: device and this thread's number of threads, number format, form of products, model's and codec's
    shape."""
    norm = model.decoder.norm.weight
    device = torch.cuda.get_device_name(norm.device) if norm.device.type == "cuda" else norm.device.type
    dtype = "int8 with " * is_int8(model) + str(norm.dtype).removeprefix("torch.")
    kernels = "fast" if model.decoder.fast else "reference"
    shape = f"{zlib.crc32(json.dumps(to_dict(model.config), sort_keys=True).encode()):08x}"
    return ", ".join((device, f"{torch.get_num_threads()} threads", dtype, kernels, shape, "" if codec is None else codec.name))


def costs_file() -> Path:
    """The file of this machine's measurements; another processor's or PyTorch's have a file of their own."""
    return cache_folder() / f"steps-{zlib.crc32(json.dumps(machine()).encode()):08x}.json"


def load_costs() -> dict[str, StepCosts]:
    """Reads this machine's measurements; empty where the file is damaged, which is logged."""
    path = costs_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: StepCosts({int(n): StepCost(*cost) for n, cost in costs.items()}) for key, costs in data.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        LOG.warning("%s is left out: %s; engine.measure() replaces it", path, " ".join(str(error).split()) or repr(error))
        return {}


WINDOW = 4096
"""Newest measurements that percentiles are taken over."""

RECENT = 512
"""Newest steps, or chunks of sound, by which cost and lateness are judged."""

AGAIN = 64
"""Steps, or chunks, after which they are judged again."""

FEW = 32
"""Chunks before which their lateness says nothing."""


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of the newest measurements, in seconds; None before there are any."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0

    @classmethod
    def of(cls, values: Collection[float]) -> Percentiles:
        newest = list(values)
        if not newest:
            return cls()
        p50, p95, p99 = (float(x) for x in np.percentile(newest, (50, 95, 99)))
        return cls(p50, p95, p99, len(newest))


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment, and its newest measurements.

    Attributes:
        active: answers under way; `live`, those of them that somebody hears as they come.
        waiting: questions without a slot, or not yet let in.
        slots, free: number of slots, and of those that nobody holds.
        steps: number of steps so far; `rows`, the mean number of rows of the newest ones.
        underruns: chunks of sound that came after they were due.
        hearing: seconds that the stepping thread spent on questions while their sound came.
        lateness: seconds by which a chunk was ready after it was due; below zero it was early.
        first_audio: seconds from a question to the first sound of its answer, of live listeners.
        slack: seconds that the stepping thread had left, at present, until a listener needs sound; None without listeners.
    """

    sessions: int = 0
    active: int = 0
    live: int = 0
    waiting: int = 0
    slots: int = 0
    free: int = 0
    steps: int = 0
    rows: float = 0.0
    answers: int = 0
    underruns: int = 0
    hearing: float = 0.0
    step: Percentiles = field(default_factory=Percentiles)
    lateness: Percentiles = field(default_factory=Percentiles)
    first_audio: Percentiles = field(default_factory=Percentiles)
    slack: float | None = None


class Recorder:
    """Collects what the threads of an engine measure.

    Args:
        key: gives the key of its model's measurements (`measured_of`).
    """

    def __init__(self, key: Callable[[], str] = str) -> None:
        self._key = key
        self._lock = threading.Lock()
        self.clear()

    @cached_property
    def known(self) -> StepCosts | None:
        """Costs of steps that were measured before, here or at an earlier start; read when they are first asked for."""
        return load_costs().get(self._key())

    def keep(self, measured: StepCosts) -> None:
        """Keep costs for the next start. Of two that write at once the last stays, whole; a folder that cannot be written is
        logged."""
        kept, path, key = load_costs(), costs_file(), self._key()
        self.known = kept[key] = StepCosts({**kept.get(key, {}), **measured})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, dict(sorted(kept.items())), indent=None)
        except (OSError, UserError) as error:
            LOG.warning("measured steps are not kept, %s cannot be written: %s", path, error)

    def clear(self) -> None:
        """Forget all that was measured."""
        with self._lock:
            self.steps, self.answers, self.underruns, self.hearing = 0, 0, 0, 0.0
            self.step: deque[tuple[int, float]] = deque(maxlen=WINDOW)
            self.lateness: deque[float] = deque(maxlen=WINDOW)
            self.first_audio: deque[float] = deque(maxlen=WINDOW)
            self.slack: float | None = None
            self._chunks = 0
            self._judged: dict[str, tuple[int, Any]] = {}

    def note(
        self,
        late: Sequence[float] = (),
        first_audio: Sequence[float] = (),
        answers: int = 0,
        hearing: float = 0.0,
        steps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Add to the figures: seconds by which live listeners' chunks were ready (of coded sound, decoded) after they were due,
        seconds to their first sounds, answers that ended, seconds of a piece of a question whose sound is coming, and rows
        and seconds of steps."""
        with self._lock:
            self.steps += len(steps)
            self.step += steps
            self._chunks += len(late)
            self.lateness += late
            self.underruns += sum(seconds > 0 for seconds in late)
            self.first_audio += first_audio
            self.answers, self.hearing = self.answers + answers, self.hearing + hearing

    def _judge(self, name: str, judge: Callable[[list[Any]], R], number: int, values: Collection[Any], least: int) -> R | None:
        """What is judged of the newest values, as it was `AGAIN` of them ago at most; None before there are `least`.
        `number`: of all so far."""
        with self._lock:
            known = self._judged.get(name)
            if known is not None and number - known[0] < AGAIN:
                return known[1]  # type: ignore[no-any-return]
            newest = list(values)[-RECENT:]
        if len(newest) < least:
            return None
        judged = judge(newest)
        self._judged[name] = number, judged
        return judged

    def late(self) -> float | None:
        """The 99th percentile of the lateness of the newest chunks; None before a few."""
        return self._judge("late", lambda late: float(np.percentile(late, 99)), self._chunks, self.lateness, FEW)

    def cost(self) -> tuple[float, float] | None:
        """Seconds of a step without rows, and more for each row, fitted to the newest steps; None before there are some."""
        return self._judge("cost", _fit, self.steps, self.step, 8)

    def step_seconds(self, rows: int) -> tuple[float, float]:
        """Seconds of a step of that many rows, and of the last of them; 0 where nothing is known."""
        cost, most = self.cost(), self._judge("most", lambda steps: max(n for n, _ in steps), self.steps, self.step, 1) or 0
        known = self.known
        if known is not None and (cost is None or 2 * most < rows):
            step = known.at(rows).seconds
            return step, max(step - known.at(rows - 1).seconds, 0.0)
        fixed, each = cost or (0.0, 0.0)
        return fixed + each * rows, each

    def stats(self, **now: int) -> EngineStats:
        """The figures, with those of this moment given by name."""
        with self._lock:
            rows = float(np.mean([n for n, _ in self.step])) if self.step else 0.0
            return EngineStats(
                **now,  # type: ignore[arg-type]
                steps=self.steps,
                rows=rows,
                answers=self.answers,
                underruns=self.underruns,
                hearing=self.hearing,
                step=Percentiles.of([seconds for _, seconds in self.step]),
                lateness=Percentiles.of(self.lateness),
                first_audio=Percentiles.of(self.first_audio),
                slack=self.slack,
            )


def _fit(steps: list[tuple[int, float]]) -> tuple[float, float]:
    rows, seconds = np.array(steps, dtype=float).T
    if rows.min() == rows.max():
        return 0.0, float(np.median(seconds)) / float(rows[0])
    each, fixed = np.polyfit(rows, seconds, 1)
    return max(float(fixed), 0.0), max(float(each), 0.0)
