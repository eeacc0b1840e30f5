"""`omni-infer bench`: measures streaming, or live sessions against the clock, on this machine, and prints tables.

Weights are random, and in bf16 on a GPU unless `--dtype` says otherwise; there the decoder of a step is compiled and captured.
A step at small batch is bound by reading its weights from memory, so that its speed is compared with plain readings of the
same tensors by the same threads in the same run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from infer.bench.live import draw, folder_config, live_table
from infer.bench.random_model import preset_lm
from infer.loading import bytes_of, cpu_threads
from infer.options import BenchOptions
from infer.timing import AnswerMeter
from omni.audio.io import SAMPLE_RATE, read_audio
from omni.config import preset
from omni.cpu import use_fast
from omni.engine.stats import LENGTH, measure_steps
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended, Timings
from omni.generate.runner import Runner
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.pretrained import find_model
from omni.tasks import TASKS
from omni.utils.charts import print_table
from omni.utils.hardware import find_device, machine, synchronize
from omni.utils.profiling import GIB, seconds_of, timed

TASK = TASKS["A1A2"]

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w.sum(),
    "dot": lambda w: torch.dot(w.view(-1), w.view(-1)),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "matrix-vector": lambda w: torch.mv(w, w[0]),
}
"""Ways to read every element of a matrix and to write next to none. The fastest depends on the processor."""


class FigureRow(NamedTuple):
    """A row of a table: name of the figure, its value and unit, and a note."""

    name: str
    value: float
    unit: str = ""
    note: str = ""


def bench(options: BenchOptions) -> None:
    """Measures and prints. UserError for an unknown preset or device."""
    device = find_device(options.device, options.quantize)
    presets = options.preset or ("nano" if options.sessions else "nano,qwen2-0.5b-omni")
    names = [] if options.model else [name.strip() for name in presets.split(",") if name.strip()]
    for name in names:
        preset(name)
    sound: Tensor = noise(options.seconds) if options.question is None else read_audio(options.question)
    plain: list[dict[str, object]] = []
    subjects: list[str | None] = [*names] if names else [None]
    for subject in subjects:
        if options.sessions is not None:
            live = live_table(options, device, subject, sound)
            plain.append(asdict(live))
            if not options.json:
                live.show()
            if options.plot is not None:
                draw(live, Path(options.plot))
            continue
        for title, rows in _tables(options, device, subject, sound):
            plain.append({"title": title, "rows": [row._asdict() for row in rows]})
            if not options.json:
                print_table(title, ("figure", "", "unit", ""), [(a, _figure(b), *more) for a, b, *more in rows])
    if options.json:
        print(json.dumps({**_machine(device), "tables": plain}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in _machine(device).items()))


def _tables(
    options: BenchOptions, device: torch.device, name: str | None, sound: Tensor
) -> Iterator[tuple[str, list[FigureRow]]]:
    """Tables of a preset with random weights, or of the options' model folder, whose answers end by themselves."""
    if name is None:
        folder_config(options)  # which says what the folder lacks
        own: Any = {"kernels": options.kernels, "quantize": options.quantize}
        lm = SpeechLM.from_pretrained(find_model(options.model or ""), device, options.dtype, **own)
    else:
        lm = preset_lm(name, device, options.dtype, options.quantize, "variable")
    with cpu_threads(options.threads, lm.model) as threads:
        use_fast(lm.model, options.kernels == "fast" and device.type == "cpu")
        compiled, assist = name is not None and device.type == "cuda", name not in (None, "nano")
        title = find_model(options.model or "") if name is None else f"{name}, random weights"
        around = "compiled, CUDA graph" if compiled else f"{threads} thread{'s' * (threads > 1)}"
        title = f"{title} ({lm}, {around})"
        rows = "text assist (two rows)" if assist else "one row"
        yield f"streaming: {title}, {rows}", _streaming(lm, options, sound, assist)
        yield f"steps: {title}, {rows}", _steps(lm, options, 2 if assist else 1, compiled)


def _streaming(lm: SpeechLM, options: BenchOptions, sound: Tensor, assist: bool) -> list[FigureRow]:
    """Measures first audio and its parts, and the real-time factor of one answer."""
    first = first_audio(lm, sound, assist, options.repeat)
    answer = whole_answer(lm, sound, assist, options.answer_seconds, options.repeat)
    rows = [
        FigureRow("first exact sample", first.total, "s", "after the question has ended"),
        FigureRow("  encoder", first.encode, "s", f"{len(sound) / SAMPLE_RATE:.3g} s of sound"),
        FigureRow("  prefill", first.prefill, "s"),
        FigureRow("  steps", first.steps, "s", f"{first.columns} steps"),
        FigureRow("  codec", first.codec, "s", "alone"),
    ]
    if answer.real_time_factor is not None and lm.codec is not None:
        codec = codec_alone(lm, round(answer.sound * lm.codec.frame_rate)) / answer.sound
        rows.append(FigureRow("real-time factor", answer.real_time_factor, "", f"an answer of {answer.sound:.2f} s"))
        rows += [FigureRow("  of the codec alone", codec), FigureRow("underruns", answer.player.underruns)]
    return rows


def _steps(lm: SpeechLM, options: BenchOptions, rows: int, compile: bool) -> list[FigureRow]:
    """Measures steps per second beside readings of the same weights."""
    step, reading, fastest, size = steps_and_readings(lm, rows, compile, max(options.repeat, 3))
    rate = 0.0 if lm.codec is None else lm.codec.frame_rate
    return [
        FigureRow("step", step * 1e3, "ms", "text and audio heads, no codec"),
        FigureRow("steps", 1 / step, "/s", f"{rate:.1f} /s play in real time"),
        FigureRow("weights a step reads", size / GIB, "GiB", "blocks and heads"),
        FigureRow("readings", 1 / reading, "/s", f"{size / reading / 1e9:.1f} GB/s, by {fastest}"),
        FigureRow("steps / readings", reading / step),
        FigureRow("weights", bytes_of(lm.model) / GIB, "GiB", "encoder, projector, decoder, embeddings"),
    ]


def _figure(value: float) -> str:
    whole = value == int(value) and abs(value) < 1e6
    return str(int(value)) if whole else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{3 if abs(value) >= 0.1 else 2}g}"


def _machine(device: torch.device) -> dict[str, str | int | float | None]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["processor"]
    rest = {"threads": torch.get_num_threads(), "load": round(psutil.getloadavg()[0], 1), "torch": torch.__version__}
    return {"device": str(device), "processor": name, **rest}


def noise(seconds: float) -> Tensor:
    """Noise at the level of speech, [S] at 16 kHz: the content of a question does not change the cost of encoding it."""
    return 0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(0))


class FirstAudio(NamedTuple):
    """Seconds from the question's end to the first exact sample, the sum of its parts; `codec`, alone, for `columns` frames."""

    total: float
    encode: float
    prefill: float
    steps: float
    codec: float
    columns: int


def first_audio(lm: SpeechLM, sound: Tensor, text_assist: bool, repeat: int) -> FirstAudio:
    """The run with the median total, of `repeat` runs after one to warm up."""
    runs, codec = list[tuple[float, Timings]](), lm.codec
    for _ in range(repeat + 1):
        with lm.session(text_assist=text_assist) as session:
            synchronize(lm.model.device)
            runs.append(first_sound(session, sound))
    total, timings = sorted(runs[1:], key=lambda run: run[0])[repeat // 2]
    assert codec is not None
    frames = next(n for n in range(1, 100) if codec.exact_samples(n) > 0)
    alone = min(codec_alone(lm, frames), total - timings.prefill)
    parts = timings.encode, timings.prefill - timings.encode, total - timings.prefill - alone, alone
    return FirstAudio(total, *parts, columns=frames - 1 + lm.layout.max_delay)  # the prefill writes the first column


def first_sound(session: Session, question: Any) -> tuple[float, Timings]:
    """Seconds until the first sound of an answer, which is then cancelled, and its times; UserError where it has no sound."""
    start, total, timings = time.perf_counter(), 0.0, Timings()
    for event in session.ask(question, TASK):
        if isinstance(event, AudioChunk) and not total:
            total = time.perf_counter() - start
            session.cancel()
        elif isinstance(event, Ended):
            timings = event.timings
    if not total:
        raise UserError("the model answered without sound; ask something that it knows with --question FILE")
    return total, timings


def codec_alone(lm: SpeechLM, frames: int) -> float:
    """Seconds in which the codec alone turns frames into sound, one after another."""
    codec, frame = lm.codec, torch.zeros(lm.layout.n_audio, 1, dtype=torch.long)
    assert codec is not None

    def decode() -> None:
        stream = codec.stream()
        for _ in range(frames):
            stream.push(frame)

    return timed(decode, lm.model.device, 1)


def whole_answer(lm: SpeechLM, sound: Tensor, text_assist: bool, seconds: float, repeat: int) -> AnswerMeter:
    """Of `repeat` answers of (at most) `seconds`, or fewer where they take long, the one with the median real-time factor."""
    runs = list[AnswerMeter]()
    while not runs or (len(runs) < repeat and sum(run.total for run in runs) < 8.0):
        with lm.session(text_assist=text_assist, max_seconds=seconds) as session:
            meter = AnswerMeter(lm.codec.sample_rate if lm.codec is not None else 0)
            for event in session.ask(sound, TASK):
                if isinstance(event, AudioChunk):
                    meter.add_sound(len(event.samples))
                elif not isinstance(event, Ended):
                    meter.add_text()
            meter.stop()
            runs.append(meter)
    return sorted(runs, key=lambda run: run.total / max(run.sound, 1e-9))[len(runs) // 2]


# --- steps ------------------------------------------------------------------------------------------------------------


def weights_of_a_step(lm: SpeechLM) -> list[Tensor]:
    """Matrices that a step reads whole: blocks and heads, but not the embedding tables, of which it takes a few rows."""
    decoder = lm.model.decoder
    text = decoder.text_embedding if decoder.text_head is None else decoder.text_head
    own = *decoder.blocks.parameters(), *decoder.post_blocks.parameters(), text.weight, decoder.audio_head.weight
    return [p for p in own if p.ndim == 2]


def readings(weights: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """Readers, by name, of as many bytes as the matrices have, in one block, so that kernel launches do not count."""
    device, size = weights[0].device, sum(w.nbytes for w in weights)
    dtype = weights[0].dtype if weights[0].is_floating_point() else torch.float32  # whole numbers have none of these ways
    count = size // dtype.itemsize // 1024
    flat = torch.ones(count, 1024, dtype=dtype, device=device)
    return {name: partial(reader, flat) for name, reader in READERS.items()}


def steps_and_readings(lm: SpeechLM, rows: int, compile: bool, rounds: int) -> tuple[float, float, str, int]:
    """Measures steps of some rows in the middle of their cache and readings in turn, so that other load affects both alike.

    Returns median seconds of a step without the codec, and of the fastest reading; its way; bytes of what a step reads."""
    weights, device = weights_of_a_step(lm), lm.model.device
    ways, runner, taken = readings(weights), Runner(lm.model, rows, LENGTH, compile=compile), list[float]()
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, read in ways.items():
            spent[name].append(seconds_of(read, device))
        taken.append(measure_steps(runner, None, [rows])[rows].seconds)
    fastest = min(spent, key=lambda name: statistics.median(spent[name]))
    return statistics.median(taken), statistics.median(spent[fastest]), fastest, sum(w.nbytes for w in weights)
