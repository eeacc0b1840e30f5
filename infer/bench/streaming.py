"""Measures the figures of the bench: first audio and its parts, real-time factor, steps against readings, rows in real
time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from infer.bench.bare import bare_loops
from infer.bench.memory_rate import WeightReader
from infer.bench.random_model import TimedCodec
from infer.timing import AnswerMeter, Figures
from omni.audio.io import SAMPLE_RATE
from omni.codec.base import CodecStream
from omni.errors import UserError
from omni.generate.prefill import pack, prefill
from omni.generate.question import Asked, encode_questions
from omni.generate.results import AudioChunk, Ended, Timings
from omni.generate.runner import Runner, Start
from omni.generate.sampling import GREEDY
from omni.generate.speech_lm import SpeechLM
from omni.hardware import synchronize
from omni.kernels import apply
from omni.model.decoder import Hidden
from omni.model.int8 import together
from omni.profiling import seconds_of, timed
from omni.tasks import TASKS, Turn, prompt

TASK = TASKS["A1A2"]

_LONG = 8.0  # seconds of answering after which an answer is not repeated


def noise(seconds: float) -> Tensor:
    """Noise at the level of speech, [S] at 16 kHz: the content of a question does not change the cost of encoding it."""
    return 0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(0))


# --- first audio ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstAudio:
    """Seconds from the end of the question to the first exact sample, and the parts they are made of.

    Attributes:
        total: until the first samples were handed out; the sum of the parts.
        encode, prefill, steps, codec: the encoder; the prefill of the question; the decoder's steps with sampling and
            everything between; the codec.
        columns: number of steps.
        frame: until a whole frame was handed out, after all of the codec's lookahead.
    """

    total: float
    encode: float
    prefill: float
    steps: float
    codec: float
    columns: int
    frame: float


def first_audio(lm: SpeechLM, sound: Tensor, text_assist: bool, repeat: int) -> FirstAudio:
    """The run with the median total, of `repeat` runs after one to warm up."""
    runs = [_first_audio(lm, sound, text_assist) for _ in range(repeat + 1)][1:]
    return sorted(runs, key=lambda run: run.total)[len(runs) // 2]


def _first_audio(lm: SpeechLM, sound: Tensor, text_assist: bool) -> FirstAudio:
    codec = lm.codec
    assert isinstance(codec, TimedCodec)
    with lm.session(text_assist=text_assist) as session:
        total = frame = decoding = 0.0
        heard, timings = 0, Timings()
        synchronize(lm.model.device)
        codec.begin()
        start = time.perf_counter()
        for event in session.ask(sound, TASK):
            now = time.perf_counter() - start
            if isinstance(event, AudioChunk):
                if not heard:
                    total, decoding = now, codec.first  # more is decoded by now, since answers are written ahead
                heard += len(event.samples)
                if heard >= codec.frame_samples and not frame:
                    frame = now
                    session.cancel()
            elif isinstance(event, Ended):
                timings = event.timings
        if not heard:
            raise UserError("the model answered without sound; ask something that it knows with --question FILE")
        decoding = min(decoding, total - timings.prefill)  # steps go on while frames without sound of their own are decoded
        return FirstAudio(
            total=total,
            encode=timings.encode,
            prefill=timings.prefill - timings.encode,
            steps=total - timings.prefill - decoding,
            codec=decoding,
            columns=_columns_until_sound(lm),
            frame=frame or total,
        )


def _columns_until_sound(lm: SpeechLM) -> int:
    """Number of steps after the prefill (which writes the first column) until the codec has the frames for its first sample."""
    codec = lm.codec
    assert codec is not None
    frames = next(n for n in range(1, 100) if codec.exact_samples(n) > 0)
    return frames - 1 + lm.layout.max_delay


@dataclass(frozen=True)
class WholeAnswer(Figures):
    """Figures of a whole answer, and the seconds of its total that the codec took."""

    codec: float = 0.0


def whole_answer(lm: SpeechLM, sound: Tensor, text_assist: bool, seconds: float, repeat: int) -> WholeAnswer:
    """Of `repeat` answers of (at most) `seconds`, or fewer where they take long, the one with the median real-time factor."""
    runs = [_whole_answer(lm, sound, text_assist, seconds)]
    while len(runs) < repeat and sum(run.total for run in runs) < _LONG:
        runs.append(_whole_answer(lm, sound, text_assist, seconds))
    return sorted(runs, key=lambda run: run.total / max(run.sound, 1e-9))[len(runs) // 2]


def _whole_answer(lm: SpeechLM, sound: Tensor, text_assist: bool, seconds: float) -> WholeAnswer:
    codec = lm.codec
    assert isinstance(codec, TimedCodec)
    with lm.session(text_assist=text_assist, max_seconds=seconds) as session:
        meter = AnswerMeter(codec.sample_rate)
        codec.seconds = 0.0
        for event in session.ask(sound, TASK):
            if isinstance(event, AudioChunk):
                meter.sound(len(event.samples))
            elif not isinstance(event, Ended):
                meter.text()
        return WholeAnswer(**vars(meter.figures()), codec=codec.seconds)


# --- steps ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Decoding steps beside plain readings of the weights that a step reads.

    Attributes:
        seconds: of a step, without the codec; median.
        reading: seconds of the fastest reading; median.
        how: name of the fastest reading.
        bytes: number of bytes that are read.
        products: seconds of the step's products alone, in the same forms; median.
        bare: seconds of a step of each of `infer.bench.bare.bare_loops`; median.
        one_row: seconds of a step of one row, beside text assist; median.
    """

    seconds: float
    reading: float
    how: str
    bytes: int
    products: float = 0.0
    bare: Mapping[str, float] = field(default_factory=dict)
    one_row: float | None = None

    @property
    def ratio(self) -> float:
        """Steps per second over readings per second."""
        return self.reading / self.seconds


def weights_of_a_step(lm: SpeechLM) -> list[Tensor]:
    """Every matrix that a step reads as a whole: blocks and heads, but not the embedding tables, of which it takes
    a few rows."""
    decoder = lm.model.decoder
    blocks = (*decoder.blocks.parameters(), *decoder.post_blocks.parameters())
    text = decoder.text_embedding if decoder.text_head is None else decoder.text_head
    return [p for p in (*blocks, text.weight, decoder.audio_head.weight) if p.ndim == 2]


def steps_and_readings(lm: SpeechLM, sound: Tensor, text_assist: bool, compile: bool, rounds: int, each: int) -> Steps:
    """Measures steps and readings in alternation, so that other load of the machine affects both alike.

    Args:
        rounds: number of times that a few steps and a reading follow each other.
        each: steps at a time.
    """
    warm_up = 3
    room = rounds * each + warm_up
    runner = _answering(lm, sound, 2 if text_assist else 1, text_assist, room, compile)
    device, reader = lm.model.device, WeightReader(weights_of_a_step(lm))
    one = _answering(lm, sound, 1, False, room, compile) if text_assist else None
    alone = _products(lm, 2 if text_assist else 1)
    loops = {of: loop.stepping() for of, loop in bare_loops(lm, sound, text_assist, steps=room).items()}
    _steps(runner, warm_up)
    alone()
    for steps in loops.values():
        steps(warm_up)
    if one is not None:
        _steps(one, warm_up)
    taken: list[float] = []
    beside: list[float] = []
    products: list[float] = []
    plain: dict[str, list[float]] = {of: [] for of in loops}
    for _ in range(rounds):
        reader.read()
        if device.type == "cuda":  # the device runs ahead of the host: only many steps together can be timed
            taken.append(seconds_of(lambda: _steps(runner, each), device) / each)
        else:
            taken += [seconds_of(lambda: _steps(runner, 1), device) for _ in range(each)]
        if one is not None:
            beside.append(seconds_of(lambda: _steps(one, each), device) / each)
        for of, steps in loops.items():
            plain[of].append(seconds_of(partial(steps, each), device) / each)
        products += [seconds_of(alone, device) for _ in range(each)]
    how, reading = reader.fastest
    median = statistics.median
    bare = {of: median(times) for of, times in plain.items()}
    return Steps(median(taken), reading, how, reader.bytes, median(products), bare, median(beside) if beside else None)


def _products(lm: SpeechLM, rows: int) -> Callable[[], None]:
    """All products of a step of some rows, in its order and forms, and nothing between them."""
    decoder = lm.model.decoder
    inputs: dict[int, Tensor] = {}

    def of(*linears: nn.Module) -> tuple[Tensor, tuple[nn.Module, ...]]:
        width = int(linears[0].in_features)  # type: ignore[arg-type]
        like = decoder.norm.weight
        return inputs.setdefault(width, torch.ones(rows, 1, width, dtype=like.dtype, device=like.device)), linears

    work = []
    for block in (*decoder.blocks, *decoder.post_blocks):
        a, m = block.attention, block.mlp
        work += [of(a.q, a.k, a.v), of(a.out), of(m.gate, m.up), of(m.down)]

    @torch.inference_mode()
    def all_of_them() -> None:
        for x, linears in work:
            if together(x, *linears) is None:
                for linear in linears:
                    apply(decoder.kernels, linear, x)
        x = inputs[lm.model.config.decoder.width]
        decoder.audio_logits(Hidden(x, x))
        decoder.text_logits(Hidden(x, x))

    return all_of_them


def rows_in_real_time(lm: SpeechLM, sound: Tensor, sizes: Sequence[int], compile: bool) -> tuple[dict[int, float], int]:
    """Measures how many sessions one machine serves: seconds of a step at several batch sizes, including the codec (a frame
    per row), and the largest size at which a step takes no longer than a frame plays (0: none)."""
    codec = lm.codec
    assert codec is not None
    taken, fits = {}, 0
    for rows in sizes:
        runner = _answering(lm, sound, rows, False, 2 + 8, compile)
        streams = [codec.stream() for _ in range(rows)]
        frame = torch.zeros(lm.layout.n_audio, 1, dtype=torch.long)
        _step_aloud(runner, streams, frame)
        taken[rows] = timed(partial(_step_aloud, runner, streams, frame), lm.model.device, 8)
        if taken[rows] > 1 / codec.frame_rate:
            break
        fits = rows
    return taken, fits


def _answering(lm: SpeechLM, sound: Tensor, rows: int, text_assist: bool, room: int, compile: bool) -> Runner:
    """A runner whose rows have been prefilled with the question and can answer for `room` steps; with text assist, row 1
    writes for row 0. UserError where the model's context is too short for that."""
    model = lm.model
    turn = Turn(TASK, features=model.config.features(len(sound)))
    (features,) = encode_questions(model, [Asked(turn, sound)])
    assert features is not None
    columns = prompt(model.layout, turn)
    length = len(columns) + room
    if length > model.config.decoder.context:
        raise UserError(
            f"{room} steps after a question of {len(columns)} positions do not fit the model's context of "
            f"{model.config.decoder.context}; lower --repeat, or ask something shorter"
        )
    runner = Runner(model, rows, length, compile=compile)
    packed = pack(model.layout, [columns] * rows, [features] * rows)
    hidden = prefill(model, runner.cache, range(rows), packed, runner.chunk)
    start = Start(text=True, audio=True, position=len(columns) - 1, settings=(GREEDY,) * len(model.layout))
    starts = [start] * rows
    if text_assist:
        speaker = Start(True, True, start.position, start.settings, partner=1)
        starts = [speaker, Start(True, False, start.position, start.settings)]
    runner.begin(range(len(starts)), hidden, starts)
    return runner


def _step_aloud(runner: Runner, streams: Sequence[CodecStream], frame: Tensor) -> None:
    """Runs one step, and one frame through every row's codec."""
    _steps(runner, 1)
    for stream in streams:
        stream.push(frame)


def _steps(runner: Runner, count: int) -> None:
    for _ in range(count):
        runner.step()
        runner.results()
