"""Evaluates conversations: held-out questions asked one after another in a session, with and without interruptions. And makes
questions with pauses, on which a turn head is evaluated (`train.eval.turn_ends`).

Each conversation is held twice, once with whole answers, once with every answer but the last cut while it plays; its questions
are also asked by themselves. Conversations are alternately spoken (A1A2) and written (T1A2).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from omni.audio.io import SAMPLE_RATE, resample
from omni.generate.speech_lm import SpeechLM
from train.console.progress import Display
from train.data.readers.templates.sentences import NUMBERS
from train.data.rows.row import Row
from train.data.seeding import seeded_rng
from train.eval.held_out import evaluate, items_of
from train.eval.turn_ends import PAUSE, SILENCE, PausedQuestion
from train.scoring.text import normalise

from .spoken import SpokenDigits, draw_question, in_parts, whole_question

TASKS = ("A1A2", "T1A2")
MAX_SECONDS = 6.0

TOGETHER = 16
"""Conversations that are held at the same time; the engine answers them in one batch."""


@dataclass(frozen=True)
class Conversed:
    """Shares of written answers that equal the reference; None where there was no such question.

    Attributes:
        alone: the questions that need no turn before them, asked by themselves, as the baseline of the turns.
        turns: the same questions in their places, a share for each turn.
        follow_ups: questions that refer to the turn before.
        uncut, cut: the second and later turns, follow-ups left out, after whole answers and after answers that were cut.
        cut_follow_ups: follow-ups after answers that were cut.
    """

    alone: float | None
    turns: tuple[float | None, ...]
    follow_ups: float | None
    uncut: float | None
    cut: float | None
    cut_follow_ups: float | None


def examine_conversations(lm: SpeechLM, source: SpokenDigits, count: int = 40) -> Conversed:
    """Holds `count` conversations of four turns (see the module)."""
    rows = source.conversations(count, seed=2)
    held = [(row, TASKS[number % 2], key) for number, row in enumerate(rows) for key in (None, (2, number))]
    display, right = Display(len(held)), []
    try:
        with ThreadPoolExecutor(TOGETHER) as pool:
            for answers in pool.map(lambda each: _converse(lm, *each), held):
                right.append(answers)
                display.tick(1, 0)
    finally:
        display.close()
    whole, cut = right[::2], right[1::2]
    places = [(r, t, source.follows(turn)) for r, row in enumerate(rows) for t, turn in enumerate(row.turns)]
    return Conversed(
        alone=_alone(lm, source, rows),
        turns=tuple(_share(whole[r][t] for r, t, follows in places if t == at and not follows) for at in range(4)),
        follow_ups=_share(whole[r][t] for r, t, follows in places if follows),
        uncut=_share(whole[r][t] for r, t, follows in places if t and not follows),
        cut=_share(cut[r][t] for r, t, follows in places if t and not follows),
        cut_follow_ups=_share(cut[r][t] for r, t, follows in places if follows),
    )


def _converse(lm: SpeechLM, row: Row, task: str, cut: tuple[int, int] | None = None) -> list[bool]:
    """Holds a conversation; returns which answers are right. With `cut`, a key that draws where, all but the last are cut."""
    right = []
    with lm.session(max_seconds=MAX_SECONDS, pace="whole") as session:
        for number, turn in enumerate(row.turns):
            spoken = turn.question_audio if task == "A1A2" else None
            question = spoken.load(SAMPLE_RATE) if spoken is not None else turn.question_text
            answer = session.ask(question, task).answer()
            right.append(normalise(answer.text) == normalise(turn.answer_text))
            if cut is not None and answer.audio is not None and number < len(row.turns) - 1:
                seconds = len(answer.audio) / answer.sample_rate * seeded_rng(*cut, number).random()
                session.cancel(played_seconds=seconds)
    return right


def _alone(lm: SpeechLM, source: SpokenDigits, rows: list[Row]) -> float | None:
    """Exact match of the questions that need no turn before them, asked by themselves, as the tasks of their conversations."""
    items = []
    for number, row in enumerate(rows):
        alone = [replace(row, turns=(turn,)) for turn in row.turns if not source.follows(turn)]
        items += items_of(alone, [TASKS[number % 2]], lm.codec)
    return evaluate(lm, items, rows=64, max_seconds=MAX_SECONDS).figures.get("exact_match")


def _share(right: Iterable[bool]) -> float | None:
    answers = list(right)
    return statistics.fmean(answers) if answers else None


def paused_questions(source: SpokenDigits, count: int) -> list[PausedQuestion]:
    """Questions in held-out voices in turn, arithmetic and digits alternately, each with a pause at a drawn place."""
    config, questions = source.config, list[PausedQuestion]()
    for number in range(count):
        rng = seeded_rng(3, "paused", number)
        question = draw_question(config, rng, "digits" if number % 2 else "arithmetic")
        voice = config.held_out[number // 2 % len(config.held_out)]
        manner = rng.randint(*config.rate), rng.randint(*config.pitch), rng.randint(*config.pitch_range)
        words, seconds, before = question.text.split(), rng.uniform(*PAUSE), rng.uniform(0.1, 0.5)
        at = rng.randrange(1, len(words))
        first, rest = " ".join(words[:at]), " ".join(words[at:])
        spoken = [in_parts([part], 0.0, voice, manner, config.question_rate) for part in (first, rest)]
        scale = config.peak / max(float(part.abs().max()) for part in spoken)
        parts = [resample(part, config.question_rate, SAMPLE_RATE) * scale for part in spoken]
        silences = [torch.zeros(round(s * SAMPLE_RATE)) for s in (before, seconds, SILENCE)]
        pieces = [silences[0], parts[0], silences[1], parts[1], silences[2]]
        times = np.cumsum([len(piece) for piece in pieces]) / SAMPLE_RATE
        goes_on = whole_question(config, f"{question.text} {NUMBERS[0]}")
        kinds: tuple[str, ...] = ("whole" if whole_question(config, first) else "more", "open" if goes_on else "closed")
        kinds += ("clear",) if kinds == ("more", "closed") else ()
        pause = float(times[1]), float(times[2])
        questions.append(PausedQuestion(question.text, voice, kinds, torch.cat(pieces), pause, float(times[3])))
    return questions
