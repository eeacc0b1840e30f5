"""`omni-infer bench --sessions`: live sessions against the clock, for several numbers of them.

This process is the load (`infer.bench.people`); the engine has its own, so that each one's CPU time can be told from the
other's, which is compared to a bare runner's and codec's with as many rows. What listeners note includes the way to them.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from infer.bench.people import LiveLoad, PlayedAudio, Workload
from infer.bench.random_model import bench_dtype, random_model, with_encoder_mode
from infer.loading import is_small
from infer.options import BenchOptions
from omni import plugins
from omni.checkpoint.folder import read_config, save_folder
from omni.checkpoint.places import CODEC
from omni.codec.registry import CODECS
from omni.config import ModelConfig, preset
from omni.engine.process import EngineProcess
from omni.engine.stats import Percentiles, powers_to
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.pretrained import find_model
from omni.stores.reading import local_path
from omni.tasks import TASKS, Turn, prompt
from omni.text import Tokenizer
from omni.utils.charts import BESIDE, INK, drawn, print_table, printable
from omni.utils.hardware import machine
from omni.utils.process import say
from omni.utils.profiling import GIB

COLUMNS = (
    *("sessions", "loop", "late\nms", "under-\nruns", "step\nms", "first audio\nms", "active", "engine\nCPU", "load\nCPU"),
    *("a session\nCPU", "/ bare\nCPU", "waiting"),
)


def live_table(options: BenchOptions, device: torch.device, name: str | None, sound: Tensor) -> LiveTable:
    """Plays all numbers of sessions with a preset of random weights or the options' folder; UserError where they do not fit."""
    numbers = sorted({int(word) for word in (options.sessions or "").split(",")})  # which have been checked
    config = folder_config(options) if name is None else preset(name)
    context = context_of(config, sound, options.answer_seconds)
    _check_memory(config, numbers[-1], context, device, options)
    workload = Workload(sound, options.answer_seconds, options.barge_in, options.nonstop)
    runs: list[LiveFigures] = []
    with _started(options, device, name, numbers[-1], context) as (engine, title):
        for number in numbers:
            say(f"playing {number} sessions for {workload.cycle + options.play_seconds:.0f} s")
            runs.append(asyncio.run(play(engine, workload, context, number, options.play_seconds)))
        return LiveTable(title, 1 / engine.frame_rate, runs)


async def play(
    engine: EngineProcess, workload: Workload, context: int, number: int, seconds: float, warm_up: float | None = None
) -> LiveFigures:  # fmt: skip
    """Plays a number of sessions, and measures for some seconds once all have come: after `warm_up`, a cycle by default."""
    process = psutil.Process(engine.pid)
    bare, load, sampled = engine.call("engine.measure", powers_to(number)), LiveLoad(engine, workload, context, number), []
    try:
        load.invite(number)
        await load.wait(workload.cycle if warm_up is None else warm_up)
        await load.call(engine.call, "engine.recorder.clear")
        heard = load.heard = PlayedAudio()
        start, theirs, own, here = time.perf_counter(), sum(process.cpu_times()[:2]), time.process_time(), engine.decoding
        while (passed := time.perf_counter() - start) < seconds:
            await load.wait(min(1.0, seconds / 8, seconds - passed))
            sampled.append(await load.call(engine.call, "engine.stats"))
        passed, here = time.perf_counter() - start, engine.decoding - here  # the engine's work, wherever it is done
        theirs, own = sum(process.cpu_times()[:2]) - theirs + here, time.process_time() - own - here
        load.heard = None
    finally:
        await load.close()
    stats = sampled[-1]
    active, steps = sum(sample.active for sample in sampled) / len(sampled), stats.steps * stats.rows  # of rows
    alone = bare.at(max(active, 1.0)).cpu / max(active, 1.0)
    return LiveFigures(
        loop="nonstop" if workload.nonstop else "closed",
        sessions=number,
        seconds=passed,
        **vars(heard) | {name: Percentiles.of(getattr(heard, name)) for name in ("lateness", "first_audio")},
        step=stats.step,
        active=active,
        rows=stats.rows,
        written=steps / passed,
        engine_cpu=theirs / passed,
        generator_cpu=own / passed,
        overhead=theirs / steps / alone if steps and alone else None,
        waiting=sum(sample.waiting for sample in sampled) / len(sampled),
    )


def context_of(config: ModelConfig, sound: Tensor, answer_seconds: float) -> int:
    """Positions of a conversation of four turns before it forgets; UserError where the model's do not hold one."""
    question = len(prompt(config.layout, Turn(TASKS["A1A2"], features=config.features(len(sound)))))
    answer = math.ceil(answer_seconds * CODECS.find(config.codec).frame_rate) + config.layout.max_delay + 1
    if question + answer > config.decoder.context:
        raise UserError(
            f"a question of {question} positions and an answer of {answer} do not fit the model's context of "
            f"{config.decoder.context}; lower --answer_seconds or --seconds"
        )
    return min(config.decoder.context, 4 * (question + answer))


def folder_config(options: BenchOptions) -> ModelConfig:
    """A model folder's configuration; UserError where nobody can hear its answers."""
    folder = local_path(find_model(options.model or ""))
    config = read_config(folder)
    if CODECS.find(config.codec).weights and not (folder / CODEC).is_dir():
        raise UserError(f"{folder} has no weights of the codec {config.codec!r}; put them into {folder / CODEC}")
    return config


def _check_memory(config: ModelConfig, slots: int, context: int, device: torch.device, options: BenchOptions) -> None:
    """UserError where the cache of all sessions takes more memory than is free."""
    c, width = config.decoder, bench_dtype(options.dtype, device).itemsize
    wanted = 2 * (c.layers + c.post_layers) * slots * context * c.kv_heads * c.head_size * width
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if wanted > free:
        raise UserError(
            f"--sessions {options.sessions}: the cache of {slots} rows of {context} positions takes {wanted / GIB:.1f} GiB, "
            f"and {free / GIB:.1f} GiB are free; play fewer, or lower --answer_seconds"
        )


@contextmanager
def _started(
    options: BenchOptions, device: torch.device, name: str | None, slots: int, context: int
) -> Iterator[tuple[EngineProcess, str]]:
    """The engine of a preset with random weights, or of the options' folder; and a title."""
    with ExitStack() as stack:
        folder, dtype = options.model or "", options.dtype
        if name is not None:
            folder = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-"))) / name)
            random_folder(folder, preset(name), torch_dtype := bench_dtype(dtype, device))
            dtype = str(torch_dtype).removeprefix("torch.")
        threads = options.threads or (1 if device.type == "cpu" and is_small(folder) else torch.get_num_threads())
        own: Any = {key: getattr(options, key) for key in ("quantize", "kernels")}
        own |= {"device": str(device), "dtype": dtype, "compile": device.type == "cuda" and name is not None}
        engine = stack.enter_context(EngineProcess(folder, slots=slots, context=context, threads=threads, **own))
        of = f"{threads} thread{'s' * (threads > 1)}"
        gc.collect()
        stack.callback(gc.unfreeze)
        gc.freeze()  # else what is imported is looked through while chunks wait to be noted
        yield engine, f"live sessions: {name or folder} ({engine.shown}, {of}), {machine()['processor']}"


def random_folder(folder: str, config: ModelConfig, dtype: torch.dtype) -> SpeechModel:
    """Writes a model folder of random weights, whose codec has some too; returns the model."""
    config = with_encoder_mode(config, "variable")
    if CODECS.find(config.codec).weights:
        plugins.load_plugins(["infer.bench.random_codecs"], "plugins")  # loaded in the engine's process as well
        config = replace(config, codec=f"random-{config.codec}")
    model = random_model(config, torch.device("cpu"), dtype)
    save_folder(folder, config, model.state_dict(), Tokenizer.bytes())
    return model


@dataclass(frozen=True)
class LiveFigures:
    """Figures of one number of sessions. Times in seconds; CPU in shares of one core."""

    loop: Literal["closed", "nonstop"]  # people, or rows that speak all the time
    sessions: int
    seconds: float
    lateness: Percentiles  # of chunks at their listeners, below zero early
    underruns: int
    step: Percentiles
    first_audio: Percentiles  # from the end of a question to its first sound
    active: float  # mean number of answers under way
    rows: float  # of a step
    written: float  # columns of all rows that were written in a second
    engine_cpu: float  # with what it had decoded in this process
    generator_cpu: float  # of the load
    overhead: float | None  # the engine's CPU time for a row's step over that of a bare runner and codec; None without a step
    questions: int
    answers: int
    interrupted: int
    waiting: float  # mean number of questions that waited
    errors: int


@dataclass(frozen=True)
class LiveTable:
    """Figures of one model, whose frames of sound play for `frame_seconds` each."""

    title: str
    frame_seconds: float
    runs: list[LiveFigures]

    def show(self) -> None:
        """Prints the table; three times are the 50th, 95th and 99th percentile."""
        print_table(self.title, COLUMNS, [cells(run) for run in self.runs])
        frame = f"{1e3 * self.frame_seconds:.0f} ms"
        print(f"a frame plays {frame}; times are 50th, 95th and 99th percentile; CPU in shares of a core")

    def largest_without_underrun(self) -> int | None:
        """The largest number up to which somebody heard something, and nobody a gap; None for none."""
        smooth = itertools.takewhile(lambda run: not (run.underruns or run.errors), self.runs)
        heard = [run.sessions for run in smooth if run.first_audio.count]
        return heard[-1] if heard else None


def cells(run: LiveFigures) -> list[str]:
    """A line of the table."""
    late, step, first = (_three(times) for times in (run.lateness, run.step, run.first_audio))
    shares = [f"{run.active:.1f}", f"{run.engine_cpu:.2f}", f"{run.generator_cpu:.2f}", f"{run.engine_cpu / run.sessions:.4f}"]
    rest = ["" if run.overhead is None else f"{run.overhead:.2f}", f"{run.waiting:.1f}"]
    return [str(run.sessions), run.loop, late, str(run.underruns), step, first, *shares, *rest]


def _three(percentiles: Percentiles) -> str:
    times = [None if value is None else 1e3 * value for value in (percentiles.p50, percentiles.p95, percentiles.p99)]
    return " ".join("-" if value is None else f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}" for value in times)


def draw(table: LiveTable, file: Path) -> Path:
    """Draws lateness, steps and first audio over the number of sessions as a PNG file."""
    sessions, best = [run.sessions for run in table.runs], table.largest_without_underrun()
    with drawn(file, 3, 1, (9.5, 9), BESIDE, sharex=True, height_ratios=(3, 2, 2)) as axes:
        for axis, name in zip(axes[:, 0], ("lateness", "step", "first_audio"), strict=True):
            for part, color in (("p50", "C0"), ("p95", "C1"), ("p99", "C3")):
                points = [(run.sessions, getattr(getattr(run, name), part)) for run in table.runs]
                if points := [(number, 1e3 * value) for number, value in points if value is not None]:
                    axis.plot(*zip(*points, strict=True), "-o", color=color, label=part)
            if best is not None:
                axis.axvline(best, color="C2", linewidth=1.2, linestyle=":", label=f"{best} without underrun")
            axis.set_xscale("log", base=2)
            axis.set_xticks(sessions, [str(n) for n in sessions])
            axis.minorticks_off()
            axis.set_ylabel(f"{name.replace('_', ' ')} (ms)")
        late, step, first = axes[:, 0]
        late.axhline(0.0, color=INK, linewidth=1.2, label="due")
        step.axhline(1e3 * table.frame_seconds, color=INK, linewidth=1.2, label=f"a frame, {1e3 * table.frame_seconds:.0f} ms")
        first.set_xlabel("live sessions")
        late.set_title("\n".join(textwrap.wrap(printable(table.title, 200), 95)))
    return file
