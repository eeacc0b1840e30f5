"""Rules of `data filter`: read from a YAML file, and applied to rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omni.config import from_dict
from omni.errors import UserError
from train.console.command import read_yaml
from train.data.inspect.checks import Checked, TurnMeasures, characters
from train.data.rows.row import Row, RowTurn


@dataclass(frozen=True)
class Range:
    """Lowest and highest allowed value, both included; null for none."""

    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        if any(value is not None and math.isnan(value) for value in (self.min, self.max)):
            raise UserError("a rule asks for nan, which no value is at least or at most: give a number, or null for none")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise UserError(f"a rule asks for at least {self.min:g} and at most {self.max:g}: nothing is both")

    def outside(self, value: float) -> str:
        """The reason why a value is not allowed; empty where it is."""
        if self.min is not None and value < self.min:
            return f"is {value:.4g}, the least is {self.min:g}"
        if self.max is not None and value > self.max:
            return f"is {value:.4g}, the most is {self.max:g}"
        return ""


@dataclass(frozen=True)
class WerRule:
    """Highest word error rate of each side's recording against its text; null for no limit."""

    question: float | None = None
    answer: float | None = None


@dataclass(frozen=True)
class Rules:
    """Rules of a filter; a row that breaks one of them is dropped. Rules apply to the parts that a turn has: see `require`.

    Attributes:
        turns: number of turns of a row.
        question_seconds, answer_seconds: length of the recordings (of an answer with codes only: of its frames).
        question_chars, answer_chars: characters of the texts, without spaces.
        chars_per_second: the same over the seconds, of each side.
        silence_share: share of silent windows of each recording.
        clipping: share of clipped samples of each recording.
        languages, sources, speakers, tasks: allowed values of a row's field; null for any.
        without_speakers: speakers who are left out.
        require: parts that every turn must have.
        drop_errors: drop what `data validate` calls an error of the row: broken sound, codes out of range, no fitting task.
        drop_duplicates: drop rows that equal an earlier row that is kept: as a whole (`row`), in a question's recording
            (`question_audio`) or in all words of a question and its answer (`text`).
        max_wer: highest word error rate of a Whisper's transcript, of rows that no other rule but `drop_duplicates` drops.
    """

    turns: Range | None = None
    question_seconds: Range | None = None
    answer_seconds: Range | None = None
    question_chars: Range | None = None
    answer_chars: Range | None = None
    chars_per_second: Range | None = None
    silence_share: Range | None = None
    clipping: Range | None = None
    languages: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    speakers: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    without_speakers: tuple[str, ...] = ()
    require: tuple[Literal["question_text", "question_audio", "answer_text", "answer_audio", "answer_codes"], ...] = ()
    drop_errors: bool = True
    drop_duplicates: tuple[Literal["row", "question_audio", "text"], ...] = ()
    max_wer: WerRule | None = None


def read_rules(file: Path) -> Rules:
    """Read rules from a YAML file; UserError for an unknown key (naming the closest), or a value of another type."""
    if not file.exists():
        raise UserError(f"rules {file} do not exist: name a YAML file, such as one with 'question_seconds: {{max: 30}}'")
    data = read_yaml(file, "rules")
    try:
        return from_dict(Rules, data or {}, str(file))
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(file)) else f"{file}: {text}") from error


_FIELDS = {"languages": "language", "sources": "source", "speakers": "speaker", "tasks": "task"}


def broken_rules(rules: Rules, row: Row, checked: Checked) -> Iterator[tuple[str, str]]:
    """Name and reason of each rule that a row breaks, except `drop_duplicates` and `max_wer`, which need more than the row."""
    for name, attribute in _FIELDS.items():
        allowed, value = getattr(rules, name), getattr(row, attribute)
        if allowed is not None and value not in allowed:
            yield name, f"{attribute} {value!r} is not among those of the rule"
    if row.speaker in rules.without_speakers:
        yield "without_speakers", f"speaker {row.speaker!r} is left out"
    if rules.turns is not None and (why := rules.turns.outside(len(row.turns))):
        yield "turns", f"number of turns {why}"
    for number, (turn, heard) in enumerate(zip(row.turns, checked.turns, strict=True)):
        prefix = f"turn {number}: " if len(row.turns) > 1 else ""
        for needed in rules.require:
            if not _has(turn, needed):
                yield "require", f"{prefix}there is no {needed}"
        for name, what, value in _values(turn, heard):
            bounds: Range | None = getattr(rules, name)
            if bounds is not None and value is not None and (why := bounds.outside(value)):
                yield name, f"{prefix}{what} {why}"


def _has(turn: RowTurn, name: str) -> bool:
    value = getattr(turn, name)
    return bool(value.strip()) if isinstance(value, str) else value is not None


def _values(turn: RowTurn, heard: TurnMeasures) -> Iterator[tuple[str, str, float | None]]:
    """Iterate over rule, name and value of every measure of a turn; the value is None where the turn has none."""
    asked = heard.question.seconds if heard.question else None
    for side, text, seconds in (("question", turn.question_text, asked), ("answer", turn.answer_text, heard.spoken)):
        count = characters(text)
        yield f"{side}_seconds", f"length of the {side} in seconds", seconds
        yield f"{side}_chars", f"number of characters of the {side}", count or None
        yield "chars_per_second", f"characters a second of the {side}", count / seconds if count and seconds else None
    for side, sound in (("question", heard.question), ("answer", heard.answer)):
        yield "silence_share", f"silent share of {side}_audio", sound.silence if sound else None
        yield "clipping", f"clipped share of {side}_audio", sound.clipping if sound else None
