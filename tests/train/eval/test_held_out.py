"""Evaluation: what is compared, and how, against hand-made answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.generate.results import Answer, Timings
from train.config.sections import FIGURES, CheckpointConfig, ValidationConfig
from train.data.rows.row import Codes, Row, RowTurn, Sound
from train.eval.held_out import Item, evaluate, items_of, spoken, write_answers
from train.scoring.text import compare_codes, normalise, word_errors


def answer(text: str = "", codes: Tensor | None = None, ended: Any = "end") -> Answer:
    return Answer(text=text, audio=None, sample_rate=8000, tokens=(), codes=codes, timings=Timings(), ended=ended)


class FakeLM:
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers, self.asked = list(answers), []

    def generate(self, questions: Sequence[Any], tasks: Sequence[str], **options: Any) -> list[Answer]:
        self.asked = [(tasks[i], questions[i]) for i in range(len(questions))]
        self.options = options
        return self.answers


def test_an_empty_reference_counts_what_was_inserted() -> None:
    assert word_errors("", "a b") == (2, 0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("  Minus two. ", "minus two"),
        ("It's  -  FINE!", "it's fine"),
        ("\uff11\uff12, Stra\u00dfe", "12 strasse"),
        ("...", ""),
        ("He said 'yes', the dogs' 'n' all ' '.", "he said yes the dogs n all"),
        ("don\u2019t \u2018go\u2019 \u043f\u02bc\u044f\u0442\u044c", "don't go \u043f'\u044f\u0442\u044c"),
        ("\u0932\u0921\u093c\u0915\u0940, \u0906\u0908", "\u0932\u0921\u093c\u0915\u0940 \u0906\u0908"),  # Hindi: Mn and Mc
        ("\u0645\u064e\u0631\u062d\u064e\u0628\u0627!", "\u0645\u064e\u0631\u062d\u064e\u0628\u0627"),  # Arabic vowel signs
        ("\u0645\u06cc\u200c\u062e so\u00adft", "\u0645\u06cc\u062e soft"),  # joiner, soft hyphen
        ("I \u2764\ufe0f it 1\ufe0f \u00b4a \u0301", "i it 1 a"),  # marks upon nothing, variation selectors
    ],
)
def test_normalise(text: str, wanted: str) -> None:
    assert normalise(text) == wanted


def test_codes_are_compared_up_to_the_shorter() -> None:
    reference = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert compare_codes(reference, reference) == (6, 6)
    assert compare_codes(reference, torch.tensor([[1, 9], [4, 5]])) == (3, 4)
    assert compare_codes(reference, torch.tensor([[1, 2, 3, 7], [4, 5, 0, 7]])) == (5, 6)
    assert compare_codes(reference, torch.zeros(2, 0, dtype=torch.long)) == (0, 6)
    assert compare_codes(reference, None) == (0, 6)


def test_figures_of_a_set() -> None:
    codes = torch.tensor([[1, 2], [3, 4]])
    items = [
        Item("A1A2", torch.zeros(160), "q0", "minus two", codes, "arithmetic"),
        Item("A1A2", torch.zeros(160), "q1", "one two three", codes, "digits"),
        Item("A1A2", torch.zeros(160), "q2", "four", codes, "digits"),
        Item("T1A1", "say it", "say it", None, codes, "digits"),
    ]
    last = torch.tensor([[1, 0], [3, 0]])
    answers = [answer("Minus two.", codes), answer("one three", codes[:, :1], ended="length"), answer("for"), answer("", last)]
    lm = FakeLM(answers)
    limits = ValidationConfig(rows=2, max_seconds=3.0, max_tokens=5)
    report = evaluate(lm, items, **limits.answering)  # type: ignore[arg-type]
    assert lm.options["batch_size"] == 2 and lm.options["max_seconds"] == 3.0 and lm.options["max_tokens"] == 5
    assert [task for task, _ in lm.asked] == ["A1A2"] * 3 + ["T1A1"]
    assert report.figures == {
        "exact_match": pytest.approx(1 / 3),
        "wer": pytest.approx(2 / 6),
        "code_accuracy": pytest.approx((4 + 2 + 0 + 2) / (4 + 2 + 4 + 4)),
        "ended": 0.75,
        "exact_match/arithmetic": 1.0,
        "exact_match/digits": 0.0,
        "exact_match/A1A2": pytest.approx(1 / 3),
        "code_accuracy/T1A1": 0.5,
    }


def test_answers_are_written_and_one_is_heard(tmp_path: Path) -> None:
    codes = torch.ones(2, 3, dtype=torch.long)
    items = [Item("A1A2", torch.zeros(9), "a?", "b", codes), Item("A1A2", torch.zeros(9), "c?", "d", codes)]
    lm = FakeLM([answer("x", codes), answer("d", codes)])
    report = evaluate(lm, items)  # type: ignore[arg-type]
    write_answers(report, tmp_path / "deep" / "answers.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "deep" / "answers.jsonl").read_text().splitlines()]
    assert [(r["question"], r["answer"], r["exact"], r["code_accuracy"]) for r in rows] == [
        ("a?", "x", False, 1.0),
        ("c?", "d", True, 1.0),
    ]
    codec = SimpleNamespace(decode=lambda codes: codes.float().sum(0))
    chosen, sound = spoken(report, codec)  # type: ignore[arg-type, misc]
    assert chosen.item.question_text == "c?" and sound.tolist() == [2.0, 2.0, 2.0]
    assert spoken(evaluate(FakeLM([answer("x"), answer("y")]), items), codec) is None  # type: ignore[arg-type]


def test_rows_become_items_of_the_tasks_that_they_can_be() -> None:
    codec = SimpleNamespace(name="codec2", check=lambda frames: frames)
    sound = Sound(torch.ones(16000), 16000)
    whole = RowTurn("what", sound, "that", None, Codes("codec2", torch.ones(4, 2)))
    rows = [Row((whole,), source="digits/arithmetic"), Row((RowTurn("why", None, "so"),), source="stored")]
    items = items_of(rows, ["A1A2", "A1T1", "T1T2"], codec)  # type: ignore[arg-type]
    assert [(i.task, i.text, i.part, i.codes is not None) for i in items] == [
        ("A1A2", "that", "arithmetic", True),
        ("A1T1", "what", "arithmetic", False),
        ("T1T2", "that", "arithmetic", False),
        ("T1T2", "so", "", False),
    ]
    assert isinstance(items[0].question, Tensor) and items[2].question == "what"
    with pytest.raises(UserError, match=r"held-out.*\bA1A2\b"):
        items_of(rows[1:], ["A1A2"], codec)  # type: ignore[arg-type]


def test_a_held_out_row_that_cannot_be_asked_is_named_before_anybody_trains() -> None:
    encoder = WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0, long_audio="refuse")
    rows = [
        Row((RowTurn("q", Sound(torch.zeros(16000 * seconds), 16000), "a"),), source="digits", where=f"test.parquet row {i}")
        for i, seconds in enumerate((1, 3))
    ]
    assert len(items_of(rows, ["A1T1"], None)) == 2
    with pytest.raises(UserError, match=r"held-out test.parquet row 1: the sound lasts 3.0 s and the encoder takes 2 s"):
        items_of(rows, ["A1T1"], None, encoder)
    broken = [Row((RowTurn("q", Sound(path="/nowhere.wav"), "a"),), source="digits", where="test.parquet row 0")]
    with pytest.raises(UserError, match=r"held-out test.parquet row 0: .*nowhere"):
        items_of(broken, ["A1T1"], None, encoder)
    with pytest.raises(UserError, match="no held-out row can be read; the first of 1, test.parquet row 0: "):
        items_of(broken, ["A1T1"], None, encoder, broken={})


@pytest.mark.parametrize(("kinds", "shown"), [(1, 0), (2, 2), (24, 24), (25, 0)])
def test_a_few_kinds_of_questions_are_reported_by_themselves(kinds: int, shown: int) -> None:
    """Where every row names its own origin there would be a column of the log for each."""
    items = [Item("T1T2", "q", "q", "yes", None, f"kind{i % kinds}") for i in range(26)]
    report = evaluate(FakeLM([answer("yes")] * 26), items)  # type: ignore[arg-type]
    assert len([name for name in report.figures if "/" in name]) == shown


def test_every_figure_may_be_a_checkpoints_metric() -> None:
    items = [Item("A1A2", "q", "q", "yes", torch.zeros(2, 3), kind) for kind in ("a", "b")]
    report = evaluate(FakeLM([answer("yes", torch.zeros(2, 3))] * 2), items)  # type: ignore[arg-type]
    assert {name.partition("/")[0] for name in report.figures} == {*FIGURES} - {"loss"}  # which is of the held-out rows
    for name in report.figures:
        assert CheckpointConfig(metric=name).metric == name
