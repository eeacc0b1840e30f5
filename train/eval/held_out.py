"""Evaluates a model by free-running generation: asks held-out questions, and compares the answers with their references. The
figures are those of `measures`; an answer without frames counts as all wrong codes.

Dimensions: A audio streams, F frames, S samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omni.audio.io import SAMPLE_RATE
from omni.encoder.config import EncoderConfig
from omni.errors import UserError
from omni.generate.results import Answer
from omni.stores.tries import StoreError
from omni.tasks import Task, find_task
from train.scoring.text import Normaliser, compare_codes, normalise, text_errors

if TYPE_CHECKING:
    from torch import Tensor

    from omni.codec.base import AudioCodec
    from omni.generate.speech_lm import SpeechLM
    from train.data.rows.row import Row

GROUPS = 24
"""Most parts of a set (kinds, or tasks) that are reported by themselves."""


@dataclass(frozen=True)
class Item:
    """One held-out question with its references.

    Attributes:
        question: a text, or the spoken question [S] at 16 kHz; `question_text` in writing, "" where it is unknown.
        text, codes: the reference answer, and its frames [A, F]; None where the task has none, or the row.
        part: a part of the set that is also reported by itself ("" for none).
        system: the system message before it ("" for none).
    """

    task: str
    question: str | Tensor
    question_text: str
    text: str | None
    codes: Tensor | None
    part: str = ""
    system: str = ""


@dataclass(frozen=True)
class Judged:
    """An item, the model's answer, and the pairs of the measures (see `measures`); none where there is nothing to compare."""

    item: Item
    answer: Answer
    scores: dict[str, tuple[float, float]]

    @property
    def exact(self) -> bool | None:
        """Whether the text equals the reference; None without one."""
        return bool(self.scores["exact_match"][0]) if "exact_match" in self.scores else None


@dataclass(frozen=True)
class HeldOutReport:
    """Figures over a set of questions, and every answer."""

    figures: dict[str, float]
    judged: tuple[Judged, ...]


def read_item(row: Row, task: Task, codec: AudioCodec | None, encoder: EncoderConfig | None) -> Item:
    """Reads the question and references of a row's first turn, which has what the task asks by; `part` is the part of its
    source after the slash. UserError for sound that cannot be read or, with an `encoder`, is too long for it."""
    turn = row.turns[0]
    question: str | Tensor = turn.question_text
    if task.question == "audio" and turn.question_audio:
        question = turn.question_audio.load(SAMPLE_RATE)
        if encoder is not None:
            encoder.clips(len(question))
    codes = turn.answer_codes.for_codec(codec) if task.audio and turn.answer_codes and codec else None
    text = turn.written(task) if task.text else None
    return Item(task.name, question, turn.question_text, text, codes, row.source.partition("/")[2], row.system)


def items_of(
    rows: Iterable[Row],
    tasks: Sequence[str],
    codec: AudioCodec | None,
    encoder: EncoderConfig | None = None,
    broken: dict[str, str] | None = None,
) -> list[Item]:
    """Makes items of held-out rows (`read_item`), each row's first turn once for every task that it has all parts for.

    `broken` receives why rows are left out; where it is None a broken row is a UserError, as is that none can be asked.
    """
    items = []
    for row in rows:
        for task in map(find_task, tasks):
            if row.turns[0].lacks(task) is not None:
                continue
            try:
                items.append(read_item(row, task, codec, encoder))
            except StoreError:
                raise
            except UserError as error:
                if broken is None:
                    raise UserError(f"held-out {row.where}: {error}") from error
                broken.setdefault(row.where, f"{row.where}: {error}")
    if not items and broken:
        raise UserError(f"no held-out row can be read; the first of {len(broken)}, {next(iter(broken.values()))}")
    if not items:
        raise UserError(f"no held-out row has what the tasks {', '.join(tasks)} need; see validation.tasks")
    return items


def evaluate(
    lm: SpeechLM, items: Sequence[Item], *, rows: int = 32, max_seconds: float = 10, max_tokens: int = 512, sound: bool = False
) -> HeldOutReport:
    """Asks every question, greedily, `rows` side by side, and compares the answers; `sound`: also decodes them to sound. A
    spoken answer has at most `max_seconds`, one that is only written `max_tokens`."""
    answers = lm.generate(
        [item.question for item in items],
        [item.task for item in items],
        max_seconds=max_seconds,
        max_tokens=max_tokens,
        batch_size=rows,
        sound=sound,
        system=[item.system for item in items],
    )
    judged = tuple(Judged(item, answer, scores_of(item, answer)) for item, answer in zip(items, answers, strict=True))
    figures = summarise(judged) | _by(lambda j: j.item.part, judged) | _by(lambda j: j.item.task, judged)
    return HeldOutReport(figures, judged)


def scores_of(
    item: Item, answer: Answer, normaliser: Normaliser = normalise, language: str = ""
) -> dict[str, tuple[float, float]]:
    """Compares an answer with its references; the pairs of the measures."""
    scores: dict[str, tuple[float, float]] = {"ended": (float(answer.ended == "end"), 1)}
    if item.text is not None:
        said, wanted = normaliser(answer.text), normaliser(item.text)
        unit, errors, size = text_errors(wanted, said, language)
        scores |= {unit: (errors, size), "exact_match": (float(said == wanted), 1)}
    if item.codes is not None:
        scores["code_accuracy"] = compare_codes(item.codes, answer.codes)
    return scores


def summarise(judged: Sequence[Judged]) -> dict[str, float]:
    """The figures of answers; what has no reference is left out."""
    out: dict[str, float] = {}
    for name in ("exact_match", "wer", "code_accuracy", "ended"):
        pairs = [j.scores[name] for j in judged if name in j.scores]
        if pairs:
            out[name] = sum(value for value, _ in pairs) / max(1.0, sum(weight for _, weight in pairs))
    return out


def _by(group: Callable[[Judged], str], judged: Sequence[Judged]) -> dict[str, float]:
    """Exact match, or else code accuracy, of every group, where there are at least two and at most `GROUPS`."""
    names = sorted({group(j) for j in judged} - {""})
    out: dict[str, float] = {}
    for name in names if 1 < len(names) <= GROUPS else []:
        figures = summarise([j for j in judged if group(j) == name])
        for key in [key for key in ("exact_match", "code_accuracy") if key in figures][:1]:
            out[f"{key}/{name}"] = figures[key]
    return out


def write_answers(report: HeldOutReport, file: Path) -> None:
    """Writes one JSON line per question: what was asked, expected and answered."""
    lines = []
    for judged in report.judged:
        item, answer, accuracy = judged.item, judged.answer, summarise([judged]).get("code_accuracy")
        asked = {"task": item.task, "kind": item.part, "question": item.question_text, "reference": item.text}
        record = {**asked, "answer": answer.text, "exact": judged.exact, "code_accuracy": accuracy, "ended": answer.ended}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


def spoken(report: HeldOutReport, codec: AudioCodec) -> tuple[Judged, Tensor] | None:
    """A spoken answer, if any, and its sound [S]; preferably the first with the right text to a spoken question."""
    import torch

    heard = [j for j in report.judged if j.answer.codes is not None and j.answer.codes.shape[1] > 0]
    if not heard:
        return None
    chosen = next((j for j in heard if j.exact and not isinstance(j.item.question, str)), heard[0])
    assert chosen.answer.codes is not None
    with torch.no_grad():
        return chosen, codec.decode(chosen.answer.codes)
