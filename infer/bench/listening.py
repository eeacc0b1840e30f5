"""Measures how soon an answer sounds after questions of several lengths, heard while they came and given whole."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.bench.streaming import TASK, noise
from infer.bench.tables import FigureRow, FigureTable, target_of
from infer.progress import WorkBar
from omni.audio.io import SAMPLE_RATE
from omni.charts import COLORS, GRID, INK, printable, pyplot_quietly, save_figure
from omni.errors import UserError
from omni.generate.results import AudioChunk
from omni.generate.session import Session
from omni.generate.speech_lm import SpeechLM

LENGTHS = (1.0, 4.0, 16.0)
"""Seconds of the questions."""
PIECE = 0.02
"""Seconds of a piece, which comes when it would be spoken."""


@dataclass(frozen=True)
class ListeningTable(FigureTable):
    """The table, and its curve.

    Attributes:
        name: of the model.
        lengths: seconds of the questions; `heard` and `whole`, seconds until the first sound after each.
    """

    name: str
    lengths: Sequence[float]
    heard: Sequence[float]
    whole: Sequence[float]


class HeardQuestion(NamedTuple):
    """Seconds from the end of a question to the first sound; for one of the question, those that hearing it took while it came,
    and those of processors in all."""

    first: float
    hearing: float
    busy: float


def announced(repeat: int, models: Sequence[str]) -> str:
    """What is about to be measured, and how long that takes at least."""
    seconds = (repeat + 1) * sum(LENGTHS) * len(models)
    lengths = ", ".join(f"{length:g}" for length in LENGTHS)
    each = f"questions of {lengths} s, {repeat + 1} times each as they come and whole"
    return f"{', '.join(models)}: {each}; {seconds:.0f} s or more"


def listening_table(lm: SpeechLM, name: str, what: str, repeat: int, lengths: tuple[float, ...] = LENGTHS) -> ListeningTable:
    """First sound after each length of a question; medians of `repeat` after one to warm up. Shows how far it is.

    Args:
        name: of the preset, for its targets.

    Raises:
        UserError: the model's encoder hears whole questions only, or the model answered without sound.
    """
    size = lm.config.encoder.chunk_samples
    if size is None:
        raise UserError(f"this encoder ({lm.config.encoder.kind}) hears whole questions only; measure one in mode chunked")
    rows, firsts, wholes = list[FigureRow](), list[float](), list[float]()
    soon, share = (target_of(lm, name, row) for row in ("first sound, heard", "hearing"))
    with WorkBar("listening", unit="s") as bar:
        done, total = 0.0, (repeat + 1) * sum(lengths)

        def tell(seconds: float) -> None:
            nonlocal done
            done += seconds
            bar(done, total, f"question of {seconds:g} s")

        measured = [_measured(lm, seconds, repeat, tell) for seconds in lengths]
    for seconds, (heard, whole) in zip(lengths, measured, strict=True):
        first = statistics.median(one.first for one in heard)
        firsts.append(first)
        wholes.append(statistics.median(whole))
        hearing, busy = statistics.median(one.hearing for one in heard), statistics.median(one.busy for one in heard)
        rows += [
            FigureRow(f"first sound after {seconds:g} s, heard", first, "s", "from the last sample to the first chunk", soon),
            FigureRow(f"first sound after {seconds:g} s, whole", wholes[-1], "s", "from asking to the first chunk"),
            FigureRow(f"hearing {seconds:g} s", hearing, "", "share of real time that it takes of the engine", share),
            FigureRow("the same, of processors", busy, "s", "for one of the question, with pieces and threads that wait"),
        ]
    rows.append(FigureRow("longest / shortest question, heard", firsts[-1] / firsts[0], "", "of first sound", 1.2))
    title = f"listening, chunks of {1000 * size // SAMPLE_RATE} ms: {what}"
    return ListeningTable(title, rows, what.partition(" (")[0], lengths, firsts, wholes)


def draw_first_sounds(tables: Sequence[ListeningTable], file: Path) -> Path:
    """Draw the first sound after the end of speech against the length of the question as a PNG file."""
    pyplot = pyplot_quietly()
    figure, axis = pyplot.subplots(figsize=(8.5, 4.2))
    for color, table in zip(COLORS, tables, strict=False):
        name = printable(table.name, 60)
        for values, way, style in ((table.heard, "heard while it came", "-o"), (table.whole, "given whole", "--s")):
            points = [1e3 * value for value in values]
            axis.plot(table.lengths, points, style, color=color, markersize=5, label=f"{name}: {way}")
            place: Any = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(f"{points[-1]:.0f} ms", (table.lengths[-1], points[-1]), fontsize=9, color=color, **place)
    lengths = sorted({length for table in tables for length in table.lengths})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set_xlim(lengths[0] / 1.3, 1.8 * lengths[-1])  # with room for the figures
    axis.set_xlabel("length of the question (s)")
    axis.set_ylabel("first sound after it (ms)")
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK)
    axis.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, file)


def _measured(
    lm: SpeechLM, seconds: float, repeat: int, tell: Callable[[float], None]
) -> tuple[list[HeardQuestion], list[float]]:
    """Figures of a question heard while it comes, and seconds to the first sound where it is given whole."""
    sound, heard = noise(seconds), list[HeardQuestion]()
    for _ in range(repeat + 1):
        heard.append(_heard(lm, sound))
        tell(seconds)
    return heard[1:], [_whole(lm, sound) for _ in range(repeat + 1)][1:]


def _heard(lm: SpeechLM, sound: Tensor) -> HeardQuestion:
    with lm.session() as session:
        listening = session.listen(TASK, sample_rate=SAMPLE_RATE)
        before = lm.engine.stats().hearing
        start, busy = time.perf_counter(), time.process_time()
        for number, piece in enumerate(sound.split(round(PIECE * SAMPLE_RATE)), 1):
            time.sleep(max(0.0, start + number * PIECE - time.perf_counter()))
            listening.push(piece)
        length = len(sound) / SAMPLE_RATE
        busy, hearing = (time.process_time() - busy) / length, (lm.engine.stats().hearing - before) / length
        return HeardQuestion(_first(session, listening), hearing, busy)


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
