"""`omni-infer bench`: measures streaming on this machine and prints tables.

All figures of a preset come from one run: the two sides of a ratio are measured in alternation. Weights are random, and in
bf16 on a GPU unless `--dtype` says otherwise; there the decoder of a step is compiled and captured as a CUDA graph.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from infer.bench.bare import bare_loops
from infer.bench.listening import ListeningTable, announced, draw_first_sounds, listening_table
from infer.bench.random_model import TimedCodec, random_lm, with_encoder_mode
from infer.bench.streaming import first_audio, noise, rows_in_real_time, steps_and_readings, whole_answer
from infer.bench.tables import FigureRow, FigureTable, number_format, plain, show, target_of
from infer.device import SMALL_MODEL, bytes_of, cpu_threads
from infer.options import BenchOptions
from infer.tls import trusting
from omni.audio.io import SAMPLE_RATE, read_audio, resample
from omni.checkpoint.int8_state import model_in_int8
from omni.config import ModelConfig, preset
from omni.encoder.whisper_config import EncoderMode
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.hardware import check_quantize, find_device, find_dtype, peak_flops
from omni.kernels import machine, measure_kernels
from omni.model.int8_model import is_int8, to_int8
from omni.model.speech_model import SpeechModel
from omni.pretrained import find_model
from omni.process import say
from omni.profiling import GIB, HighWater, load

NANO_BATCHES = (1, 4, 16, 64, 256)

PRESETS, SOUNDING = "nano,qwen2-0.5b-omni", "nano"
"""Presets that are measured, and that live sessions are played with, where none is named."""


def bench(options: BenchOptions) -> bool:
    """Measure and print; returns whether no check of a GPU failed. UserError for an unknown preset or device."""
    device = find_device(options.device, options.quantize)
    if options.gpu:
        from infer.bench.gpu import check_gpu

        if device.type == "cuda":
            return check_gpu(device, dtype=find_dtype(options.dtype))
        print("not run: there is no GPU here, or --device names none")
        return True
    if options.server is not None:
        return _talk(options)
    given = options.preset or (SOUNDING if options.sessions else PRESETS)
    names = [] if options.model else [name.strip() for name in given.split(",") if name.strip()]
    configs = {name: preset(name) for name in names}
    sound = noise(options.seconds) if options.question is None else read_audio(options.question)
    if options.sessions is not None:
        _play(options, device, configs, sound)
        return True
    if options.listening:
        say(announced(options.repeat, [options.model] if options.model else names))
    tables: list[FigureTable] = []
    for table in _tables(options, device, configs, sound):
        tables.append(table)
        if not options.json:
            show(table)
    if options.json:
        print(json.dumps({**_machine(device), "tables": [plain(t) for t in tables]}, indent=2))
    else:
        print(_on_a_line(device))
    if options.plot is not None:
        draw_first_sounds([table for table in tables if isinstance(table, ListeningTable)], Path(options.plot))
    return True


def _talk(options: BenchOptions) -> bool:
    """Talk to a server, and print what that gave; returns whether it made no mistake."""
    from infer.bench.live.play import parse_numbers
    from infer.bench.sockets import RATE, plain_figures, play_sockets, show_sockets

    assert options.server is not None
    sound = (
        resample(noise(options.seconds), SAMPLE_RATE, RATE) if options.question is None else read_audio(options.question, RATE)
    )
    numbers = parse_numbers(options.sessions or "1")
    url = options.server.rstrip("/")
    barge_in = options.barge_in if options.turns != "manual" else 0.0
    trust = None if options.certificate is None else trusting(options.certificate)
    figures = play_sockets(url, options.key, sound.numpy(), numbers, options.play_seconds, options.turns, barge_in, trust)
    if options.json:
        print(json.dumps({**machine(), "server": url, "sockets": plain_figures(figures)}, indent=2))
    else:
        show_sockets(figures, f"{url}, {options.turns}, {machine()['processor']}")
    for one in figures:
        if one.errors:
            print(f"{one.people} sockets: {one.errors} errors, such as: {one.example}")
    return not any(one.errors for one in figures)


def _play(options: BenchOptions, device: torch.device, configs: dict[str, ModelConfig], sound: Tensor) -> None:
    """Play live sessions, and print and draw what they gave."""
    from infer.bench.live.figures import show_live
    from infer.bench.live.play import live_table

    tables = []
    for named in configs.items() if options.model is None else (None,):
        table = live_table(options, device, named, sound)
        tables.append(table)
        if not options.json:
            show_live(table)
    if options.json:
        print(json.dumps({**_machine(device), "tables": [table.plain() for table in tables]}, indent=2))
    else:
        print(_on_a_line(device))
    if options.plot is not None:
        from infer.bench.live.curve import draw

        draw(tables[0], Path(options.plot))


def _tables(
    options: BenchOptions, device: torch.device, configs: dict[str, ModelConfig], sound: Tensor
) -> Iterator[FigureTable]:
    if options.model:
        yield from _folder(options, device, options.model, sound)
    for name, config in configs.items():
        yield from _preset(options, device, name, config, sound)


def _preset(
    options: BenchOptions, device: torch.device, name: str, config: ModelConfig, sound: Tensor
) -> Iterator[FigureTable]:
    """Measures a preset with random weights."""
    gpu = device.type == "cuda"
    dtype = find_dtype(options.dtype) or (torch.bfloat16 if gpu else torch.float32)
    gc.collect()
    memory = HighWater(device)
    check_quantize(options.quantize, str(device))
    mode: EncoderMode = "chunked" if options.listening else "variable"
    lm = random_lm(with_encoder_mode(config, mode), device, dtype, compile=gpu)
    if options.quantize:
        to_int8(lm.model)
    with cpu_threads(options.threads, lm.model) as threads:
        if options.kernels == "measured":
            measure_kernels(lm.model)
        around = "compiled, CUDA graph" if gpu else f"{threads} thread{'s' * (threads > 1)}"
        precision = f"{number_format(lm.model)}, {around}"
        what = f"{name} ({config.codec}, random weights, {precision})"
        if options.listening:
            yield listening_table(lm, name, what, options.repeat)
        else:
            yield from _measured(lm, options, sound, name, config, what, memory)


def _measured(
    lm: SpeechLM, options: BenchOptions, sound: Tensor, name: str, config: ModelConfig, what: str, memory: HighWater
) -> Iterator[FigureTable]:
    small, gpu = name == "nano", lm.model.device.type == "cuda"
    assist = not small
    yield _streaming(lm, options, sound, name, what, "variable", assist)
    yield _step_table(lm, options, sound, name, what, assist, compile=gpu)
    if small:
        yield _sessions(lm, sound, what, compile=gpu)
    weights = bytes_of(lm.model)
    beyond = (memory.bytes - weights) / GIB
    target = target_of(lm, name, "peak beyond the weights")
    rows = [FigureRow("weights", weights / GIB, "GiB", "encoder, projector, decoder, embeddings")]
    if not is_int8(lm.model):  # which was turned to int8 here: the peak is of that
        rows.append(FigureRow("peak beyond the weights", beyond, "GiB", "codec, caches and everything in passing", target))
    yield FigureTable(f"memory: {what}", rows)
    if options.full:
        yield _streaming(lm, options, sound, "", what, "variable", not assist)
        padded = _with_mode(lm, config, "padded", compile=gpu)
        yield _streaming(padded, options, sound, "", what, "padded", assist)


def _folder(options: BenchOptions, device: torch.device, folder: str, sound: Tensor) -> Iterator[FigureTable]:
    """Measures a model folder, whose answers end by themselves."""
    folder = find_model(folder)
    lm = SpeechLM.from_pretrained(
        folder,
        device,
        options.dtype,
        quantize=options.quantize,
        kernels=options.kernels,
        codec_folder=options.codec_folder,
    )
    if lm.codec is None:
        raise UserError(
            f"{folder} has no weights of the codec {lm.config.codec!r}, so its first audio cannot be measured; name their "
            "folder with --codec_folder"
        )
    lm = SpeechLM(lm.model, lm.tokenizer, TimedCodec(lm.codec))
    with cpu_threads(options.threads, lm.model) as threads:
        if options.kernels == "measured":
            measure_kernels(lm.model)
        name = "nano" if bytes_of(lm.model) < SMALL_MODEL else ""
        what = f"{folder} ({number_format(lm.model)}, {threads} thread{'s' * (threads > 1)})"
        if options.listening:
            yield listening_table(lm, name, what, options.repeat)
            return
        yield _streaming(lm, options, sound, name, what, getattr(lm.config.encoder, "mode", lm.config.encoder.kind), False)
        yield _step_table(lm, options, sound, name, what, False, compile=False)
        yield _sessions(lm, sound, what, compile=False)


def _streaming(
    lm: SpeechLM, options: BenchOptions, sound: Tensor, name: str, what: str, mode: str, assist: bool
) -> FigureTable:
    """Measures first audio and its parts, and the real-time factor of one answer; beside a bare loop on a CPU."""
    seconds = len(sound) / SAMPLE_RATE
    loops = bare_loops(lm, sound, assist, seconds=options.answer_seconds)
    if loops:
        for loop in loops.values():
            loop.answers(options.repeat + 1)  # before and after, since the machine's speed changes
        lm = SpeechLM(lm.model, lm.tokenizer, lm.codec)
    first = first_audio(lm, sound, assist, options.repeat)
    figures = whole_answer(lm, sound, assist, options.answer_seconds, options.repeat)
    factor = figures.real_time_factor
    if loops:
        lm.engine.close()  # whose threads would slow the bare loops
        for loop in loops.values():
            loop.answers(options.repeat)
    rows = [
        FigureRow(
            "first exact sample", first.total, "s", "after the question has ended", target_of(lm, name, "first exact sample")
        ),
        FigureRow("  encoder", first.encode, "s", f"{mode}, {seconds:.3g} s of sound"),
        FigureRow("  prefill", first.prefill, "s"),
        FigureRow("  steps", first.steps, "s", f"{first.columns} steps"),
        FigureRow("  codec", first.codec, "s"),
        FigureRow("first whole frame", first.frame, "s", "all of the codec's lookahead is there"),
    ]
    rows[-1:-1] = [_beside(of, first.total, loop.first, "s") for of, loop in loops.items()]
    if factor is not None:
        rows += [
            FigureRow(
                "real-time factor", factor, "", f"an answer of {figures.sound:.2f} s", target_of(lm, name, "real-time factor")
            ),
            FigureRow("  of which codec", figures.codec / figures.sound, "", f"{lm.codec.name if lm.codec else ''}"),
            FigureRow("underruns", figures.underruns),
        ]
        rows[-2:-2] = [_beside(of, factor, loop.factors, "") for of, loop in loops.items()]
    return FigureTable(f"streaming: {what}, {'text assist (two rows)' if assist else 'one row'}", rows)


def _beside(of: str, ours: float, bare: Sequence[float], unit: str) -> FigureRow:
    """The row of a bare loop's figure (its median) under ours."""
    middle = statistics.median(bare)
    return FigureRow(f"  of {of}", middle, unit, f"ours has {middle / ours:.2f} of its speed")


def _step_table(
    lm: SpeechLM, options: BenchOptions, sound: Tensor, name: str, what: str, assist: bool, compile: bool
) -> FigureTable:
    """Measures steps per second beside readings of the same weights."""
    on_cpu = lm.model.device.type == "cpu"
    each = 6 if on_cpu else 50
    rounds = max(options.repeat, 3)
    found = steps_and_readings(lm, sound, assist, compile, rounds, each)
    rows_of_batch = 2 if assist else 1
    rate = lm.codec.frame_rate if lm.codec is not None else 0.0
    rows = [
        FigureRow(
            "step",
            found.seconds * 1e3,
            "ms",
            f"{rows_of_batch} row{'s' * (rows_of_batch > 1)}, text and audio heads, no codec",
        ),
        FigureRow("steps", 1 / found.seconds, "/s", f"{rate:.1f} /s play in real time"),
        FigureRow("tokens", rows_of_batch * len(lm.layout) / found.seconds, "/s", "of all streams and rows"),
        FigureRow("weights a step reads", found.bytes / GIB, "GiB", "blocks and heads"),
        FigureRow("readings", 1 / found.reading, "/s", f"{found.bytes / found.reading / 1e9:.1f} GB/s, by {found.how}"),
        FigureRow("steps / readings", found.ratio, "", "", target_of(lm, name, "steps / readings")),
        FigureRow("products", found.products * 1e3, "ms", "those of a step alone, in the same forms"),
    ]
    rows += [_beside(of, found.seconds * 1e3, [seconds * 1e3], "ms") for of, seconds in found.bare.items()]
    if found.one_row is not None:
        row = "text assist / one row"
        rows.append(FigureRow(row, found.seconds / found.one_row, "", "of a step", target_of(lm, name, row)))
    peak = peak_flops(lm.model.device)
    if peak is not None:
        flops = 2 * rows_of_batch * found.bytes / lm.model.decoder.norm.weight.element_size() / found.seconds
        rows.append(FigureRow("MFU", 100 * flops / peak, "%", f"{flops / 1e12:.2f} TFLOP/s of {peak / 1e12:.0f}"))
    return FigureTable(f"steps: {what}", rows)


def _sessions(lm: SpeechLM, sound: Tensor, what: str, compile: bool) -> FigureTable:
    """Measures the number of rows that advance together in real time."""
    taken, fits = rows_in_real_time(lm, sound, NANO_BATCHES, compile)
    rows = [FigureRow(f"step of {n} rows", s * 1e3, "ms", "with the codec") for n, s in taken.items()]
    more = " or more" if fits == NANO_BATCHES[-1] else ""
    assert lm.codec is not None
    rows.append(FigureRow("sessions in real time", fits, "", f"a frame plays {1e3 / lm.codec.frame_rate:.0f} ms{more}"))
    return FigureTable(f"sessions: {what}", rows)


def _with_mode(lm: SpeechLM, config: ModelConfig, mode: EncoderMode, compile: bool) -> SpeechLM:
    """The same weights with the encoder in another mode."""
    config, state = with_encoder_mode(config, mode), lm.model.state_dict()
    model = model_in_int8(config, state, {}, "weights") if is_int8(lm.model) else SpeechModel.from_state(config, state)
    model = model.to(lm.model.device).eval()
    return SpeechLM(model.requires_grad_(False), lm.tokenizer, lm.codec, compile=compile)


def _on_a_line(device: torch.device) -> str:
    return ", ".join(f"{key} {value}" for key, value in _machine(device).items())


def _machine(device: torch.device) -> dict[str, str | int | float | None]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()["processor"]
    busy = load()
    return {
        "device": str(device),
        "processor": name,
        "threads": torch.get_num_threads(),
        "load": None if busy is None else round(busy, 1),
        "torch": torch.__version__,
    }
