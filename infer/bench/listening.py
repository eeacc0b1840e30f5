"""Measures how soon an answer sounds after questions of several lengths, heard while they came and given whole."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor

from infer.bench.streaming import TASK, noise
from infer.bench.tables import FigureRow, FigureTable, target_of
from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.generate.results import AudioChunk
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM

LENGTHS = (1.0, 4.0, 16.0)
"""Seconds of the questions."""
PIECE = 0.02
"""Seconds of a piece, which comes when it would be spoken."""


class HeardQuestion(NamedTuple):
    """Seconds from the end of a question to the first sound, and seconds of processors for one of the question."""

    first: float
    busy: float


def listening_table(lm: SpeechLM, name: str, what: str, repeat: int, lengths: tuple[float, ...] = LENGTHS) -> FigureTable:
    """First sound after each length of a question; medians of `repeat` after one to warm up.

    Args:
        name: of the preset, for its targets.

    Raises:
        UserError: the model's encoder hears whole questions only, or the model answered without sound.
    """
    size = lm.config.encoder.chunk_samples
    if size is None:
        raise UserError(f"this encoder ({lm.config.encoder.kind}) hears whole questions only; measure one in mode chunked")
    rows, firsts = list[FigureRow](), list[float]()
    soon, share = (target_of(lm, name, row) for row in ("first sound, heard", "hearing"))
    for seconds in lengths:
        sound = noise(seconds)
        heard = [_heard(lm, sound) for _ in range(repeat + 1)][1:]
        whole = [_whole(lm, sound) for _ in range(repeat + 1)][1:]
        first = statistics.median(one.first for one in heard)
        firsts.append(first)
        busy = statistics.median(one.busy for one in heard)
        rows += [
            FigureRow(f"first sound after {seconds:g} s, heard", first, "s", "from the last sample to the first chunk", soon),
            FigureRow(
                f"first sound after {seconds:g} s, whole", statistics.median(whole), "s", "from asking to the first chunk"
            ),
            FigureRow(f"hearing {seconds:g} s", busy, "", "processor seconds for one of the question", share),
        ]
    rows.append(FigureRow("longest / shortest question, heard", firsts[-1] / firsts[0], "", "of first sound", 1.2))
    return FigureTable(f"listening, chunks of {1000 * size // SAMPLE_RATE} ms: {what}", rows)


def _heard(lm: SpeechLM, sound: Tensor) -> HeardQuestion:
    with lm.session() as session:
        listening = session.listen(TASK, sample_rate=SAMPLE_RATE)
        start, busy = time.perf_counter(), time.process_time()
        for number, piece in enumerate(sound.split(round(PIECE * SAMPLE_RATE)), 1):
            time.sleep(max(0.0, start + number * PIECE - time.perf_counter()))
            listening.push(piece)
        busy = (time.process_time() - busy) / (len(sound) / SAMPLE_RATE)
        return HeardQuestion(_first(session, listening), busy)


def _whole(lm: SpeechLM, sound: Tensor) -> float:
    with lm.session() as session:
        return _first(session, sound)


@torch.inference_mode()
def _first(session: Session, question: object) -> float:
    """Seconds until the first sound of an answer, which is then cancelled."""
    start = time.perf_counter()
    for event in session.ask(question, TASK):  # type: ignore[arg-type]
        if isinstance(event, AudioChunk):
            return time.perf_counter() - start
    raise UserError("the model answered without sound; ask something that it knows")
