"""The figures of an evaluation against slow and obvious computations, and against jiwer."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pytest
import torch
from torch import Tensor

from omni.errors import UserError
from omni.generate.results import Answer, Timings
from omni.tasks import TASKS
from omni.utils.charts import drawn
from omni.utils.configuration import validate
from train.data.rows.row import Row, RowTurn
from train.eval.answers import EvalQuestion, judge, timing_scores
from train.eval.config import EvalConfig
from train.eval.held_out import Item
from train.eval.measures import MEASURES, RESAMPLES, Figure, difference, figure, plain, shown
from train.eval.report import (
    ANSWERS,
    TEXT,
    TEXT_BEFORE,
    TIMINGS,
    Run,
    ScoreChange,
    _bars,
    draw_comparison,
    draw_report,
    signed,
    verdict,
)
from train.scoring.text import find_normaliser, says_the_same, text_errors

PAIRS = np.array([[0, 2], [1, 3], [4, 4], [2, 1], [0, 5]], dtype=float)
KINDS = {"share": "wer", "ratio": "real_time_factor", "perplexity": "text_perplexity", "median": "first_audio"}


def slow(kind: str, pairs: list[list[float]]) -> float:
    if kind == "median":
        return statistics.median(a for a, _ in pairs)
    ratio = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    return math.exp(ratio) if kind == "perplexity" else ratio


@pytest.mark.parametrize("kind", KINDS)
def test_a_figure_and_its_interval_are_those_of_the_loop(kind: str) -> None:
    name = KINDS[kind]
    assert MEASURES[name].kind == kind
    found = figure(name, PAIRS, seed=5)
    assert found.value == pytest.approx(slow(kind, PAIRS.tolist())) and found.questions == len(PAIRS)
    rng = np.random.default_rng(5)
    drawn = [slow(kind, PAIRS[rng.integers(len(PAIRS), size=len(PAIRS))].tolist()) for _ in range(RESAMPLES)]
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])))


@pytest.mark.parametrize("name", ["speech_text_wer", "text_perplexity"])
def test_what_weighs_nothing_has_no_figure(name: str) -> None:
    none = figure(name, np.array([[2.0, 0.0], [1.0, 0.0]]))
    assert all(math.isnan(number) for number in (none.value, none.low, none.high)) and none.questions == 2
    assert shown(name, none.value) == "-" == signed(name, none.value)
    assert plain(none) == {"value": None, "low": None, "high": None, "questions": 2}
    apart = difference(name, np.array([[2.0, 0.0]]), np.array([[2.0, 1.0]]))
    assert math.isnan(apart.value) and verdict(name, replace(apart, questions=9)) == "not told apart"


def test_resamples_that_weigh_nothing_are_left_out() -> None:
    pairs = np.array([[2, 0], [1, 0], [0, 0], [0, 3]], dtype=float)
    found = figure("speech_text_wer", pairs, seed=5)
    rng = np.random.default_rng(5)
    drawn = [pairs[rng.integers(4, size=4)].sum(0) for _ in range(RESAMPLES)]
    kept = [errors / words for errors, words in drawn if words]
    assert len(kept) < RESAMPLES and found.value == 1
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(kept, [2.5, 97.5])))


@pytest.mark.usefixtures("whole_pictures")
def test_pictures_of_what_has_no_figure(tmp_path: Path) -> None:
    none, some = Figure(math.nan, math.nan, math.nan, 2), Figure(0.5, 0.4, 30.0, 9)
    run = Run(tmp_path, {"model": "m", "data": "d"}, {name: [] for name in (ANSWERS, TIMINGS, TEXT, TEXT_BEFORE)})
    figures = {"ended": some, "speech_text_wer": none, "text_perplexity": Figure(math.inf, 2.0, math.inf, 3)}
    with drawn(tmp_path / "bars.png") as axes:
        axis = axes[0, 0]
        _bars(axis, {name: (name, figures[name]) for name in ("ended", "speech_text_wer")})
    assert axis.get_xlim() == (0, pytest.approx(3360.0)) and [bar.get_width() for bar in axis.patches] == [50.0, 0.0]
    assert [(text.get_text(), text.xy[0]) for text in axis.texts] == [("50.00 %", 3000.0), ("-", 0.0)]
    assert draw_report(run, figures).read_bytes().startswith(b"\x89PNG")
    changes = {name: ScoreChange(f, f, none) for name, f in figures.items()}
    assert draw_comparison(changes, ("a", "b"), tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_is_paired(kind: str) -> None:
    name = KINDS[kind]
    same = difference(name, PAIRS, PAIRS)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    worse = PAIRS + np.array([[1, 0]])
    found = difference(name, PAIRS, worse, seed=2)
    assert found.value == pytest.approx(slow(kind, worse.tolist()) - slow(kind, PAIRS.tolist()))
    assert 0 < found.low <= found.value <= found.high
    if kind == "median":  # every question is slower by the same, so nothing is left to chance
        assert (found.low, found.high) == (1, 1)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(1), 0
    for i in range(60):
        right = rng.random(80) < 0.3
        found = figure("exact_match", np.stack([right, np.ones(80)], axis=1).astype(float), seed=i)
        hits += found.low <= 0.3 <= found.high
    assert 50 <= hits <= 60


def test_one_question_and_resampling_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    one = figure("wer", PAIRS[1:2])
    assert one.value == one.low == one.high == pytest.approx(1 / 3)
    whole = figure("wer", PAIRS)
    monkeypatch.setattr("train.eval.measures._CELLS", 7)
    assert figure("wer", PAIRS) == whole


SAID = [("the cat sat", "the cat sat"), ("the cat sat", "a cat sits down"), ("one", ""), ("seven eight nine", "seven nine")]


@pytest.mark.parametrize("language", ["en", "zh-CN", "ja"])
def test_errors_over_a_set_are_those_of_jiwer(language: str) -> None:
    counted = [text_errors(reference, said, language) for reference, said in SAID]
    assert {unit for unit, _, _ in counted} == {"wer" if language == "en" else "cer"}
    references, said = [list(side) for side in zip(*SAID, strict=True)]
    if language == "en":
        wanted = jiwer.wer(references, said)
    else:
        wanted = jiwer.cer([r.replace(" ", "") for r in references], [s.replace(" ", "") for s in said])
    pairs = np.array([pair for _, *pair in counted], dtype=float)
    assert figure("wer", pairs).value == pytest.approx(wanted)


def test_normalisers() -> None:
    text = "Mr. Brown's colour, twenty-one!"
    assert find_normaliser("basic")(text) == "mr brown's colour twenty one"
    assert find_normaliser("whisper", "en-GB")(text) == "mister brown is color 21"
    assert find_normaliser("whisper", "nl")(text) == "mr brown s colour twenty one"
    with pytest.raises(UserError, match="normaliser.*'loose'"):
        validate(EvalConfig, {"normaliser": "loose"})


@pytest.mark.parametrize(
    ("question", "a", "b", "same"),
    [
        ("What is the capital of France?", "The capital of France is Paris.", "Paris! It lies on the Seine.", True),
        ("What is the capital of France?", "The capital of France is Paris.", "The capital of Spain is Madrid.", False),
        ("What is two plus two?", "Two plus two is four.", "4", True),
        ("Is the earth flat?", "No, it is not.", "Yes, it is.", False),
        ("Is it?", "It is.", "it is", True),
        ("Is it?", "...", "", False),
        ("Which city?", "1. Paris has museums.", "1. Rome has ruins.", False),
        ("Why?", "Dust scatters blue light.", "Dust scatters red shadows", True),  # half of four
        ("Why?", "Dust scatters blue light.", "Dust makes red shadows", False),
    ],
)
def test_answers_that_say_the_same(question: str, a: str, b: str, same: bool) -> None:
    normaliser = find_normaliser("whisper")
    assert says_the_same(question, a, b, normaliser) == says_the_same(question, b, a, normaliser) == same


def answer(text: str, codes: Tensor | None = None, audio: Tensor | None = None, ended: Any = "end") -> Answer:
    return Answer(text, audio, 100, (), codes, Timings(), ended)


def asked(task: str, reference: str | None, codes: Tensor | None = None, language: str = "en") -> EvalQuestion:
    row = Row((RowTurn("what?"),), id="r1", language=language, where="here row 1")
    return EvalQuestion(4, row, Item(task, torch.zeros(8000), "what?", reference, codes))


def test_an_answer_is_judged() -> None:
    codes = torch.tensor([[1, 2, 3], [4, 5, 6]])
    got = answer("Two, three.", torch.tensor([[1, 9], [4, 5]]), torch.ones(50), ended="length")
    plain = EvalConfig(normaliser="basic")
    record = judge(asked("A1A2", "one two three", codes), got, TASKS["A1A2"], plain, "to three", "one two", "What? Not.")
    assert record["scores"] == {
        "ended": (0, 1),
        "wer": (1, 3),
        "exact_match": (0, 1),
        "code_accuracy": (3, 4),
        "speech_wer": (jiwer.process_words("one two three", "to three").wer * 3, 3),
        "ear_wer": (1, 3),
        "speech_text_wer": (1, 2),
        "alignment_wer": (1, 1),
    }
    assert (record["heard"], record["seconds"]) == ("to three", 0.5)


def test_what_has_no_reference_or_is_not_spoken_is_left_out() -> None:
    written = judge(asked("A1T2", None), answer("x"), TASKS["A1T2"], EvalConfig())
    assert written["scores"] == {"ended": (1, 1)}
    silent = judge(asked("A1A2", "x"), answer("X!", None, torch.zeros(80)), TASKS["A1A2"], EvalConfig(), "")
    assert silent["heard"] == "" and silent["scores"]["speech_text_wer"] == (1, 1) and silent["scores"]["exact_match"] == (1, 1)
    chinese = judge(asked("A1T2", "\u4f60\u597d\u5417", language="zh"), answer("\u4f60\u597d"), TASKS["A1T2"], EvalConfig())
    assert chinese["scores"]["cer"] == (1, 3) and "wer" not in chinese["scores"]


def test_times_of_a_streamed_answer() -> None:
    assert timing_scores(Timings(first_text=0.02, first_audio=0.15, total=0.6, audio=1.2)) == {
        "first_text": (20, 1),
        "first_audio": (150, 1),
        "real_time_factor": (0.6, 1.2),
    }
    assert timing_scores(Timings(total=0.1)) == {}
