"""Evaluates a turn head: how soon it notices that a question has ended, and how often it cuts a speaker off who pauses.

Held-out questions in held-out voices, each in two parts with a pause between, silence behind, each part spoken by itself:

    | what is seven |   pause   | plus four |   silence, SILENCE seconds   |
      cut off: ended before the last word ends      delay: from there to the end of the chunk with which it is decided

Figures are taken apart by whether the words before the pause could be a whole question ("say seven") or not ("what is
seven"), and by whether more could come after the last word (another digit) or not: then nobody can know the end at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.files import write_json, write_whole
from omni.generate.listening import RULES, EndRule, TurnListener, ended
from omni.utils.charts import drawn, markdown_table

SILENCE = 4.0
"""Seconds of silence behind a question; an end that is not noticed in it is missed, and counts as noticed with its end: the
longest wait of `auto`."""

PAUSE = (0.3, 1.5)
"""Seconds of the pause."""

KINDS = {
    "more": "pause: more must come",
    "whole": "pause: could be the whole",
    "closed": "end: nothing can follow",
    "open": "end: a digit could follow",
    "clear": "pause: more must come; end: nothing can follow",
}
"""A question is of one of the first two kinds, of one of the next two, and of the last where it is both `more` and `closed`."""

THRESHOLDS = (0.02, 0.05, *(round(0.1 * i, 1) for i in range(1, 10)), 0.95, 0.98, 0.99, 0.995, 0.998)
JSON, TABLE, PICTURE = "turn_ends.json", "turn_ends.md", "turn_ends.png"
TOGETHER = 16


@dataclass(frozen=True)
class PausedQuestion:
    """A question with a pause.

    Attributes:
        kinds: keys of `KINDS`.
        sound: samples [S] at 16 kHz.
        pause: seconds at which the pause begins and ends.
        end: second at which the last word ends.
    """

    text: str
    voice: str
    kinds: tuple[str, ...]
    sound: Tensor
    pause: tuple[float, float]
    end: float


@dataclass(frozen=True)
class TurnFigures:
    """Figures of the questions of one kind: quantiles of the seconds from the end of speech to the decision, and the shares of
    those that were ended too early, and whose end was not noticed."""

    questions: int
    p50: float
    p95: float
    cut_off: float
    missed: float


def decided(listener: TurnListener, question: PausedQuestion, probabilities: Tensor, rule: EndRule) -> tuple[bool, float]:
    """Whether a question was cut off, and the seconds from the end of its speech to the decision."""
    length = len(question.sound) / SAMPLE_RATE
    encoder = listener.encoder.config
    chunk = encoder.chunk_samples / SAMPLE_RATE if encoder.chunk_samples else length
    ends = (ended(probabilities, rule).nonzero().flatten().double() + 1) / encoder.frames_per_second  # of deciding frames
    late = ends[ends >= question.end]
    known = min(math.ceil(float(late[0]) / chunk - 1e-9) * chunk, length) if len(late) else length
    return len(late) < len(ends), known - question.end


def figures_of(
    listener: TurnListener, questions: Sequence[PausedQuestion], probabilities: Sequence[Tensor], rule: EndRule
) -> dict[str, TurnFigures]:
    """Figures by kind of question."""
    out = {}
    for kind in KINDS:
        own = [decided(listener, q, p, rule) for q, p in zip(questions, probabilities, strict=True) if kind in q.kinds]
        if own:
            delays = np.array([delay for _, delay in own])
            p50, p95 = (float(x) for x in np.quantile(delays, (0.5, 0.95)))
            missed = float((delays >= SILENCE - 1e-6).mean())
            out[kind] = TurnFigures(len(own), p50, p95, float(np.mean([cut for cut, _ in own])), missed)
    return out


def evaluate_turn_ends(listener: TurnListener, questions: Sequence[PausedQuestion], out: Path) -> dict[str, Any]:
    """Evaluates a turn head at each eagerness and over the threshold; writes a table, JSON and a picture."""
    probabilities: list[Tensor] = []  # [T, 2] of each question, as `TurnListener.stream` gives them
    for start in range(0, len(questions), TOGETHER):
        frames, counts = listener.encoder.encode([question.sound for question in questions[start : start + TOGETHER]])
        probabilities += listener.probabilities(frames).cpu().split(counts)
    by_rule = {name: figures_of(listener, questions, probabilities, rule) for name, rule in RULES.items() if name != "auto"}
    curve = {t: figures_of(listener, questions, probabilities, replace(RULES["medium"], threshold=t)) for t in THRESHOLDS}
    report = {
        "questions": len(questions),
        "chunk_ms": getattr(listener.encoder.config, "chunk_ms", None),
        "rules": {name: asdict(rule) for name, rule in RULES.items()},
        "eagerness": {name: {kind: asdict(figures) for kind, figures in own.items()} for name, own in by_rule.items()},
        "curve": {str(t): {kind: asdict(figures) for kind, figures in own.items()} for t, own in curve.items()},
    }
    head = ["eagerness", "questions where", "number", "delay p50", "delay p95", "cut off", "missed"]
    rows = []
    for name, own in by_rule.items():
        for kind, f in own.items():
            delays, shares = [f"{1000 * delay:.0f} ms" for delay in (f.p50, f.p95)], [f"{f.cut_off:.1%}", f"{f.missed:.1%}"]
            rows.append([name, KINDS[kind], str(f.questions), *delays, *shares])
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / JSON, report)
    write_whole(out / TABLE, markdown_table(head, rows) + "\n")
    draw_turn_ends(curve, out / PICTURE)
    return report | {"table": (head, rows)}


def draw_turn_ends(curve: dict[float, dict[str, TurnFigures]], file: Path) -> Path:
    """Draws cut-offs against the delay's 95 % quantile over the threshold, a line for each kind of pause."""
    with drawn(file) as axes:
        axis = axes[0, 0]
        for kind, title in list(KINDS.items())[:2]:
            points = {t: (1000 * kinds[kind].p95, 100 * kinds[kind].cut_off) for t, kinds in curve.items() if kind in kinds}
            if points:
                count = next(kinds[kind].questions for kinds in curve.values() if kind in kinds)
                axis.plot(*zip(*points.values(), strict=True), marker="o", label=f"{title} ({count} questions)")
                for threshold, point in list(points.items())[::3]:
                    axis.annotate(f"{threshold:g}", point, fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set_xlabel("end of speech to decision, 95 % quantile in ms (numbers: threshold)")
        axis.set_ylabel("cut off, per cent of questions")
        axis.set_ylim(bottom=0)
    return file
