"""What a step costs on this machine by its number of rows: measured at a start, kept, and read by engines that never measured.

A step is measured as an engine takes it: a runner's step of n rows, while the codec turns a frame of each of n answers into
sound in another thread. Rows stand in the middle of the cache. There is no encoder, prefill, event or listener in it.

What was measured is kept in the user's cache folder beside the kernels (`omni.cpu.kernels`), in a file for each processor and
PyTorch, by device, threads, number format, kernels, model and codec.
"""

from __future__ import annotations

import json
import logging
import statistics
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.config import to_dict
from omni.cpu.kernels import machine
from omni.errors import UserError
from omni.files import cache_folder, write_json
from omni.generate.rows import Start
from omni.generate.runner import Runner
from omni.generate.sampling import GREEDY
from omni.model.decoder import Hidden
from omni.model.int8_model import is_int8
from omni.model.speech_model import SpeechModel

LOG = logging.getLogger(__name__)

STEPS = 8
"""Steps of each number of rows, after two that are not counted."""

MOST = 64
"""Rows up to which an engine is measured that has no fixed number of slots."""

LENGTH = 512
"""Positions of a row for measurements, where an engine has no length of its own."""


class MeasuredOf(NamedTuple):
    """What a measurement is of: device and its threads, number format, form of products, model's and codec's shape."""

    device: str
    threads: int
    numbers: str
    kernels: str
    model: str
    codec: str


class StepCost(NamedTuple):
    """Seconds until a step and its sound are done (median), and CPU seconds of all threads (mean)."""

    seconds: float
    cpu: float


@dataclass(frozen=True)
class StepCosts:
    """Costs of a step by its number of rows, at least one."""

    by_rows: Mapping[int, StepCost]

    def seconds(self, rows: float) -> float:
        """Seconds of a step of that many rows, between and beyond the measured ones in a line."""
        return self._line(rows, [cost.seconds for _, cost in sorted(self.by_rows.items())])

    def cpu(self, rows: float) -> float:
        """The same of CPU seconds."""
        return self._line(rows, [cost.cpu for _, cost in sorted(self.by_rows.items())])

    def _line(self, rows: float, values: Sequence[float]) -> float:
        known, rising = sorted(self.by_rows), np.maximum.accumulate(values)
        if rows <= known[-1]:
            return float(np.interp(rows, known, rising))
        if len(known) == 1:
            return float(rising[0]) * rows / known[0]
        slope = (rising[-1] - rising[-2]) / (known[-1] - known[-2])
        return float(rising[-1] + slope * (rows - known[-1]))


class KnownCosts:
    """The costs that an engine knows: its own measurement, or else what was kept, which is read when it is first asked for."""

    def __init__(self, model: SpeechModel, codec: AudioCodec | None) -> None:
        self._model, self._codec = model, codec
        self._costs: StepCosts | None = None
        self._read = False

    @property
    def costs(self) -> StepCosts | None:
        """None where nothing is known."""
        if not self._read:
            self._costs, self._read = load_costs().get(measured_of(self._model, self._codec)), True
        return self._costs

    def measure(self, runner: Runner, rows: Sequence[int], whole: bool) -> StepCosts:
        """Measure with a runner without answers under way (all numbers of rows, or those that are in real time and one more),
        keep what was found, and return it."""
        frame = None if whole or self._codec is None else 1 / self._codec.frame_rate
        found = measure_steps(runner, self._codec, rows, frame)
        key = measured_of(self._model, self._codec)
        kept = load_costs()
        before = kept[key].by_rows if key in kept else {}
        self._costs, self._read = StepCosts({**before, **found.by_rows}), True
        keep_costs({**kept, key: self._costs})
        return found


def check_measuring(rows: Sequence[int] | None, slots: int | None, sessions: int) -> None:
    """UserError for numbers of rows that are none or too many, and where sessions are open, whose rows would be written."""
    for number in rows or ():
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= (slots or 65536):
            most = f"the engine's {slots} slots" if slots else "65536"
            raise UserError(f"rows: {number!r:.40} is no number of rows to measure; give whole numbers from 1 to {most}")
    if sessions:
        raise UserError(f"{sessions} sessions are open; measure before the first, or close them")


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
    found: dict[int, StepCost] = {}
    with ThreadPoolExecutor(1, "omni-measure") as beside:
        for number in sorted(set(rows)):
            if number > len(runner.rows):
                runner.grow(number, runner.length)
            runner.warm_up(_starts(runner, number))
            found[number] = _measure(runner, codec, number, beside)
            if most is not None and found[number].seconds > most:
                break
    return StepCosts(found)


def _starts(runner: Runner, number: int) -> list[Start]:
    middle = max(0, min(runner.length // 2, runner.length - STEPS - 4))
    return [Start(True, True, middle, (GREEDY,) * len(runner.layout))] * number


@torch.inference_mode()
def _measure(runner: Runner, codec: AudioCodec | None, number: int, beside: ThreadPoolExecutor) -> StepCost:
    norm = runner.model.decoder.norm.weight
    hidden = norm.new_zeros(number, 1, norm.shape[0])
    rows = runner.begin(range(number), Hidden(hidden, hidden), _starts(runner, number))
    batch = None if codec is None else codec.batch()
    streams = [batch.open() for _ in rows] if batch is not None else []
    frames = _frames(codec, number)
    taken, cpu = [], 0.0
    try:
        runner.results(flush=True)
        for step in range(2 + STEPS):
            for row in rows:  # what garbage says is not to end them
                row.done, row.needs_text, row.needs_audio = False, True, True
            start, used = time.perf_counter(), time.process_time()
            sound = None if batch is None else beside.submit(batch.push, streams, next(frames))
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
        if batch is not None:
            for stream in streams:
                batch.close(stream)
    return StepCost(statistics.median(taken), cpu / STEPS)


def _frames(codec: AudioCodec | None, number: int) -> Iterator[Tensor]:
    """Frames [N, K, 1] of random codes, without end: a codec may take longer for sound than for silence."""
    generator = torch.Generator().manual_seed(0)
    while codec is not None:
        yield torch.stack([torch.randint(n, (number, 1), generator=generator) for n in codec.codebook_sizes], dim=1)


# --- what is kept ---------------------------------------------------------------------------------------------------


def measured_of(model: SpeechModel, codec: AudioCodec | None) -> MeasuredOf:
    """What a measurement with this model, codec and this thread's number of threads is of."""
    norm = model.decoder.norm.weight
    device = torch.cuda.get_device_name(norm.device) if norm.device.type == "cuda" else norm.device.type
    numbers = "int8 with " * is_int8(model) + str(norm.dtype).removeprefix("torch.")
    kernels = "reference" if model.decoder.kernels is None else "measured"
    shape = f"{zlib.crc32(json.dumps(to_dict(model.config), sort_keys=True).encode()):08x}"
    return MeasuredOf(device, torch.get_num_threads(), numbers, kernels, shape, "" if codec is None else codec.name)


def costs_file() -> Path:
    """The file of this machine's measurements; another processor's or PyTorch's have a file of their own."""
    return cache_folder() / f"steps-{zlib.crc32(json.dumps(machine()).encode()):08x}.json"


def load_costs() -> dict[MeasuredOf, StepCosts]:
    """What was measured on this machine before; nothing where the file is another machine's or damaged, which is told."""
    path = costs_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["machine"] != machine():
            raise ValueError("it is another machine's")
        return {MeasuredOf(*_typed(key, _KEY)): _costs(values) for key, values in data["steps"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning("%s is left out: %s; engine.measure() replaces it", path, " ".join(str(error).split()) or repr(error))
        return {}


_KEY = (str, int, str, str, str, str)


def _typed(values: Any, types: Sequence[type]) -> list[Any]:
    if not isinstance(values, list) or [type(value) for value in values] != list(types):
        raise ValueError(f"{str(values)[:80]} is no measurement")
    return values


def _costs(values: Any) -> StepCosts:
    found = {}
    for value in values:
        rows, seconds, cpu = _typed(value, (int, float, float))
        if rows < 1 or not (0 < seconds < float("inf") and 0 <= cpu < float("inf")):
            raise ValueError(f"{value} is no measurement")
        found[rows] = StepCost(seconds, cpu)
    if not found:
        raise ValueError("a measurement has no rows")
    return StepCosts(found)


def keep_costs(costs: Mapping[MeasuredOf, StepCosts]) -> None:
    """Keep measurements for the next start. Of two that write at once the last stays, whole; a folder that cannot be written is
    told."""
    path = costs_file()
    steps = [[list(key), [[rows, *cost] for rows, cost in sorted(one.by_rows.items())]] for key, one in sorted(costs.items())]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"machine": machine(), "steps": steps}, indent=None)
    except (OSError, UserError) as error:
        LOG.warning("measured steps are not kept, %s cannot be written: %s", path, error)
