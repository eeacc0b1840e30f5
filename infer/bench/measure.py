"""First audio and its parts, the real-time factor, and steps against readings of the same weights.

A step at small batch is bound by reading its weights from memory, so that its speed is compared with plain readings of the
same tensors by the same threads in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.timing import AnswerMeter, Figures
from omni.audio.io import SAMPLE_RATE
from omni.engine.stats import LENGTH, measure_steps
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended, Timings
from omni.generate.runner import Runner
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM
from omni.tasks import TASKS
from omni.utils.hardware import synchronize
from omni.utils.profiling import seconds_of, timed

TASK = TASKS["A1A2"]


def noise(seconds: float) -> Tensor:
    """Noise at the level of speech, [S] at 16 kHz: the content of a question does not change the cost of encoding it."""
    return 0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(0))


class FirstAudio(NamedTuple):
    """Seconds from the end of the question to the first exact sample, the sum of its parts.

    Attributes:
        codec: what the codec alone takes for the frames of `columns` steps.
    """

    total: float
    encode: float
    prefill: float
    steps: float
    codec: float
    columns: int


def first_audio(lm: SpeechLM, sound: Tensor, text_assist: bool, repeat: int) -> FirstAudio:
    """The run with the median total, of `repeat` runs after one to warm up."""
    runs, codec = [_first_audio(lm, sound, text_assist) for _ in range(repeat + 1)][1:], lm.codec
    total, timings = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    assert codec is not None
    frames = next(n for n in range(1, 100) if codec.exact_samples(n) > 0)
    alone = min(codec_alone(lm, frames), total - timings.prefill)
    parts = timings.encode, timings.prefill - timings.encode, total - timings.prefill - alone, alone
    return FirstAudio(total, *parts, columns=frames - 1 + lm.layout.max_delay)  # the prefill writes the first column


def _first_audio(lm: SpeechLM, sound: Tensor, text_assist: bool) -> tuple[float, Timings]:
    with lm.session(text_assist=text_assist) as session:
        synchronize(lm.model.device)
        return first_sound(session, sound)


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


def whole_answer(lm: SpeechLM, sound: Tensor, text_assist: bool, seconds: float, repeat: int) -> Figures:
    """Of `repeat` answers of (at most) `seconds`, or fewer where they take long, the one with the median real-time factor."""
    runs = list[Figures]()
    while not runs or (len(runs) < repeat and sum(run.total for run in runs) < 8.0):
        with lm.session(text_assist=text_assist, max_seconds=seconds) as session:
            meter = AnswerMeter(lm.codec.sample_rate if lm.codec is not None else 0)
            for event in session.ask(sound, TASK):
                if isinstance(event, AudioChunk):
                    meter.sound(len(event.samples))
                elif not isinstance(event, Ended):
                    meter.text()
            runs.append(meter.figures())
    return sorted(runs, key=lambda run: run.total / max(run.sound, 1e-9))[len(runs) // 2]


# --- steps ------------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda w: w.sum(),
    "dot": lambda w: torch.dot(w.view(-1), w.view(-1)),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "matrix-vector": lambda w: torch.mv(w, w[0]),
}
"""Ways to read every element of a matrix and to write next to none. The fastest depends on the processor."""


def weights_of_a_step(lm: SpeechLM) -> list[Tensor]:
    """Matrices that a step reads whole: blocks and heads, but not the embedding tables, of which it takes a few rows."""
    decoder = lm.model.decoder
    text = decoder.text_embedding if decoder.text_head is None else decoder.text_head
    own = *decoder.blocks.parameters(), *decoder.post_blocks.parameters(), text.weight, decoder.audio_head.weight
    return [p for p in own if p.ndim == 2]


def readings(weights: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """What reads all bytes of matrices once, by the way; they lie together, so that the launch of kernels does not count."""
    device, size = weights[0].device, sum(w.nbytes for w in weights)
    dtype = weights[0].dtype if weights[0].is_floating_point() else torch.float32  # whole numbers have none of these ways
    count = size // dtype.itemsize // 1024
    flat = torch.ones(count, 1024, dtype=dtype, device=device)
    return {name: partial(reader, flat) for name, reader in READERS.items()}


def steps_and_readings(lm: SpeechLM, rows: int, compile: bool, rounds: int) -> tuple[float, float, str, int]:
    """Measures steps of some rows in the middle of their cache and readings in turn, so that other load affects both alike.

    Returns:
        Median seconds of a step without the codec, and of the fastest reading; its way; bytes of what a step reads.
    """
    weights, device = weights_of_a_step(lm), lm.model.device
    ways, runner, taken = readings(weights), Runner(lm.model, rows, LENGTH, compile=compile), list[float]()
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, read in ways.items():
            spent[name].append(seconds_of(read, device))
        taken.append(measure_steps(runner, None, [rows]).by_rows[rows].seconds)
    fastest = min(spent, key=lambda name: statistics.median(spent[name]))
    return statistics.median(taken), statistics.median(spent[fastest]), fastest, sum(w.nbytes for w in weights)
