"""`omni-infer bench`: measures streaming, or live sessions against the clock, on this machine, and prints tables.

Weights are random, and in bf16 on a GPU unless `--dtype` says otherwise; there the decoder of a step is compiled and captured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from infer.bench.figures import draw
from infer.bench.live import folder_config, live_table
from infer.bench.measure import codec_alone, first_audio, noise, steps_and_readings, whole_answer
from infer.bench.random_model import preset_lm
from infer.device import bytes_of, cpu_threads
from infer.options import BenchOptions
from omni.audio.io import SAMPLE_RATE, read_audio
from omni.config import preset
from omni.cpu.kernels import machine, measure_kernels
from omni.generate.speech_lm import SpeechLM
from omni.pretrained import find_model
from omni.utils.charts import print_table
from omni.utils.hardware import find_device
from omni.utils.profiling import GIB, load


class FigureRow(NamedTuple):
    """A row of a table: name of the figure, its value and unit, and a note."""

    name: str
    value: float
    unit: str = ""
    note: str = ""


def bench(options: BenchOptions) -> None:
    """Measures and prints. UserError for an unknown preset or device."""
    device = find_device(options.device, options.quantize)
    given = options.preset or ("nano" if options.sessions else "nano,qwen2-0.5b-omni")
    names = [] if options.model else [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        preset(name)
    sound: Tensor = noise(options.seconds) if options.question is None else read_audio(options.question)
    plain: list[dict[str, object]] = []
    subjects: list[str | None] = [*names] if names else [None]
    for subject in subjects:
        if options.sessions is not None:
            live = live_table(options, device, subject, sound)
            plain.append(live.plain())
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
    lm = _loaded(options, device, name)
    with cpu_threads(options.threads, lm.model) as threads:
        if options.kernels == "measured":
            measure_kernels(lm.model)
        compiled, assist = name is not None and device.type == "cuda", name not in (None, "nano")
        what = find_model(options.model or "") if name is None else f"{name}, random weights"
        around = "compiled, CUDA graph" if compiled else f"{threads} thread{'s' * (threads > 1)}"
        what = f"{what} ({lm}, {around})"
        rows = "text assist (two rows)" if assist else "one row"
        yield f"streaming: {what}, {rows}", _streaming(lm, options, sound, assist)
        yield f"steps: {what}, {rows}", _steps(lm, options, 2 if assist else 1, compiled)


def _loaded(options: BenchOptions, device: torch.device, name: str | None) -> SpeechLM:
    if name is None:
        folder_config(options)  # which says what the folder lacks
        own = {"kernels": options.kernels, "codec_folder": options.codec_folder, "quantize": options.quantize}
        return SpeechLM.from_pretrained(find_model(options.model or ""), device, options.dtype, **own)  # type: ignore[arg-type]
    return preset_lm(name, device, options.dtype, options.quantize, "variable")


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
        rows += [FigureRow("  of the codec alone", codec), FigureRow("underruns", answer.underruns)]
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
    name, busy = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["processor"], load()
    rest = {"threads": torch.get_num_threads(), "load": None if busy is None else round(busy, 1), "torch": torch.__version__}
    return {"device": str(device), "processor": name, **rest}
