"""Conversations are examined in sessions: whoever forgets what was interrupted, or tires, is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from digits.asking import examine_conversations
from digits.options import SpokenDigitsConfig
from digits.spoken import SpokenDigits
from torch import Tensor

from omni.generate.results import Answer, Timings
from tests.train.data.toys import ToyCodec
from train.data.rows.row import RowTurn

CODEC = ToyCodec((12, 12, 6, 8))
SOURCE = SpokenDigits(SpokenDigitsConfig(turns=(0, 0, 0, 1), follow_ups=0.5), CODEC)


def said(text: str) -> Answer:
    return Answer(text, torch.zeros(1600), 8000, (), torch.zeros(4, 5, dtype=torch.long), Timings(), "end")


class Forgetful:
    """Knows every question, but not what was cut, and is silent in the fourth turn."""

    codec = CODEC

    def __init__(self, count: int) -> None:
        self.rows = SOURCE.conversations(count, seed=2)
        self.sessions: list[Talk] = []

    def session(self, **_: Any) -> Talk:
        self.sessions.append(Talk(self))
        return self.sessions[-1]

    def generate(self, questions: list[Any], tasks: list[str], **_: Any) -> list[Answer]:
        turns = [turn for row in self.rows for turn in row.turns]
        found = [next(t for t in turns if same(t, question)) for question in questions]
        assert not any(SOURCE.follows(turn) for turn in found)
        return [said(turn.answer_text) for turn in found]


class Talk:
    def __init__(self, lm: Forgetful) -> None:
        self.possible = [row.turns for row in lm.rows]  # conversations that began so: several are held at a time
        self.answered, self.cut = 0, 0

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ask(self, question: Any, task: str) -> Talk:
        self.possible = [turns for turns in self.possible if same(turns[self.answered], question)]
        turn = self.possible[0][self.answered]
        assert task == ("A1A2" if isinstance(question, Tensor) else "T1A2")
        self.answered += 1
        lost = self.answered == 4 or (SOURCE.follows(turn) and self.cut > 0)
        self.said = said("" if lost else turn.answer_text)
        return self

    def answer(self) -> Answer:
        return self.said

    def cancel(self, played_seconds: float) -> None:
        assert 0 <= played_seconds < 0.2
        self.cut += 1


def same(turn: RowTurn, question: Any) -> bool:
    if isinstance(question, Tensor):
        return turn.question_audio is not None and torch.equal(turn.question_audio.load(16000), question)
    return turn.question_text == question


def test_turns_interruptions_and_follow_ups_are_counted_apart():
    lm = Forgetful(12)
    found = examine_conversations(lm, SOURCE, 12)  # type: ignore[arg-type]
    assert found.alone == 1.0 and found.turns == (1.0, 1.0, 1.0, 0.0)
    later = [(t, SOURCE.follows(turn)) for row in lm.rows for t, turn in enumerate(row.turns) if t]
    early, last = (sum(t < 3 and f for t, f in later), sum(t == 3 and f for t, f in later))
    assert early and last and found.follow_ups == pytest.approx(early / (early + last))
    plain = [t < 3 for t, follows in later if not follows]
    assert found.uncut == found.cut == pytest.approx(sum(plain) / len(plain)) and found.cut_follow_ups == 0.0
    assert sorted(talk.cut for talk in lm.sessions) == [0] * 12 + [3] * 12
    assert {talk.answered for talk in lm.sessions} == {4}
