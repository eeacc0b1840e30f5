"""Asks every question once and scores its answer, one record each; streams some, for their times, and holds conversations.

A record is plain data: `index` and `where` in the data, what was asked, expected, written and heard (by the ASR), and `scores`,
the pairs of the measures (see `measures`). One that cannot be asked has `broken`, the reason, instead. Of a conversation, held
in a session after the model's own answers, the record has `source` and `turns`, each with question, reference, response and
`right`, whether the texts are equal.

First audio and real-time factor are of questions that are streamed one by one, in the seconds of
`omni.generate.results.Timings`: from the question's samples in hand to the first samples of the answer. The first question is
streamed once more beforehand and not counted, since that includes what is done only once.

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.question import SAMPLE_RATE, read_question, read_system
from omni.generate.results import Answer, Ended, Timings
from omni.generate.speech_lm import SpeechLM
from omni.model.projector import TokenHead
from omni.tasks import Task, prompt
from train.console.progress import Progress
from train.data.rows.row import Row
from train.data.seeding import key
from train.eval.config import EvalConfig
from train.eval.held_out import Item, read_item, scores_of
from train.eval.journal import noting_broken, record_all
from train.eval.measures import MEASURES, metric_scores
from train.eval.questions import Questions, RecordRow
from train.scoring.asr import ASR, transcripts
from train.scoring.text import find_normaliser, text_errors


@dataclass(frozen=True)
class EvalQuestion:
    """A question ready to be asked, with its row and index in the data."""

    index: int
    row: Row
    item: Item


def make_question(lm: SpeechLM, task: Task, index: int, row: Row) -> EvalQuestion:
    """Makes a question with its references of the first turn of a row; UserError for no question of the task's kind, or one
    that cannot be read or leaves no room for an answer."""
    turn, codec = row.turns[0], lm.codec
    if task.question == "audio" and turn.question_audio is None:
        raise UserError(f"has no question_audio, which {task.name} asks by")
    if task.question == "text" and not turn.question_text.strip():
        raise UserError(f"has no question_text, which {task.name} asks by")
    if codec is not None and turn.answer_codes is not None and turn.answer_codes.codec != codec.name:
        codec = None  # these codes are no reference
    item = read_item(row, task, codec, lm.config.encoder)
    asked = read_question(item.question, task, lm.config, lm.tokenizer).after(read_system(row.system, lm.tokenizer))
    columns = len(prompt(lm.layout, asked.turn))
    if columns >= lm.config.decoder.context:
        raise UserError(f"takes {columns} positions, and the model's context has {lm.config.decoder.context}")
    return EvalQuestion(index, row, replace(item, text=(item.text if task.text else turn.question_text) or None))


def answer_all(
    lm: SpeechLM, questions: Questions, task: Task, config: EvalConfig, asr: ASR | None, file: Path, progress: Progress
) -> None:
    """Asks the questions that have no record yet, and appends their records to `file`."""

    def score(asked: list[EvalQuestion]) -> list[dict[str, Any]]:
        answers = ask(lm, asked, config, sound=asr is not None or any(measure.sound for measure in MEASURES.values()))
        heard, read = recognise(asr, asked, answers, lm.codec), read_questions(lm, asked)
        together = zip(asked, answers, heard, read, strict=True)
        return [judge(q, answer, task, config, *texts, written) for q, answer, texts, written in together]

    record_all(file, questions, config, progress, partial(make_question, lm, task), score)


def ask(lm: SpeechLM, asked: Sequence[EvalQuestion], config: EvalConfig, sound: bool) -> list[Answer]:
    """Answers questions in batches; each is sampled with its own seed."""
    return lm.generate(
        [question.item.question for question in asked],
        [question.item.task for question in asked],
        seed=[key(config.seed, question.index) % (1 << 31) for question in asked],
        batch_size=config.batch,
        sound=sound,
        system=[question.item.system for question in asked],
        **config.answering,
    )


@torch.no_grad()
def recognise(
    asr: ASR | None, asked: Sequence[EvalQuestion], answers: Sequence[Answer], codec: AudioCodec | None
) -> list[tuple[str | None, str | None]]:
    """Recognises spoken answers, and the codes of their references, where they have some that are written too."""
    if asr is None or codec is None:
        return [(None, None)] * len(asked)
    languages = [query.row.language for query in asked]
    codes = [query.item.codes if query.item.text is not None else None for query in asked]
    right = transcripts(asr, [c if c is None else codec.decode(c) for c in codes], codec.sample_rate, languages)
    heard = transcripts(asr, [answer.audio for answer in answers], answers[0].sample_rate, languages)
    return [(text, None if c is None else r) for text, r, c in zip(heard, right, codes, strict=True)]


@torch.no_grad()
def read_questions(lm: SpeechLM, asked: Sequence[EvalQuestion]) -> list[str | None]:
    """What a model with a head `tokens` reads of each spoken question whose text is known."""
    model, texts = lm.model, []
    for item in (query.item for query in asked):
        text = None
        if isinstance(model.alignment_head, TokenHead) and not isinstance(item.question, str) and item.question_text:
            frames, counts = model.encoder.encode([item.question])
            features = model.projector(frames, counts, [item.task])
            text = lm.tokenizer.decode([i for ids in model.heard(features, counts) for i in ids])
        texts.append(text)
    return texts


def judge(
    query: EvalQuestion,
    answer: Answer,
    task: Task,
    config: EvalConfig,
    heard: str | None = None,
    right: str | None = None,
    read: str | None = None,
) -> dict[str, Any]:
    """Scores an answer; returns its record, without `index` and `where`. `heard`: what the ASR recognises of it; `right`: of
    the reference's codes; `read`: what the alignment head reads of the question."""
    row, item, normaliser = query.row, query.item, find_normaliser(config.normaliser, query.row.language)
    scores = scores_of(item if task.text else replace(item, text=None), answer, normaliser, row.language)
    reference = None if item.text is None else normaliser(item.text)

    def errors(wanted: str, transcribed: str) -> tuple[float, float]:
        return text_errors(wanted, normaliser(transcribed), row.language)[1:]

    if heard is not None and reference is not None:
        scores["speech_wer"] = errors(reference, heard)
        if right is not None:
            scores["ear_wer"] = errors(reference, right)
    if heard is not None and task.text:
        scores["speech_text_wer"] = errors(normaliser(answer.text), heard)
    if read is not None:
        scores["alignment_wer"] = errors(normaliser(item.question_text), read)
    record: dict[str, Any] = {
        "id": row.id,
        "source": row.source,
        "language": row.language,
        "speaker": row.speaker,
        "question": item.question_text,
        "reference": item.text,
        "response": answer.text,
        "heard": heard,
        "read": read,
        "ended": answer.ended,
        "seconds": 0.0 if isinstance(item.question, str) else round(len(item.question) / SAMPLE_RATE, 3),
        "scores": scores | metric_scores(item, answer, row),
    }
    if isinstance(row, RecordRow):
        record["given"] = {name: value for name, value in row.fields.items() if not isinstance(value, bytes)}
    return record


def time_some(
    lm: SpeechLM, questions: Questions, answered: Sequence[int], task: Task, config: EvalConfig, file: Path, progress: Progress
) -> None:
    """Streams `config.timed` of the questions at `answered`, spread evenly over them, and writes a record of each."""
    first = True

    def score(asked: list[EvalQuestion]) -> Iterator[dict[str, Any]]:
        nonlocal first
        for question in asked:
            if first:
                stream_timings(lm, question.item, config)
                first = False
            scores = timing_scores(stream_timings(lm, question.item, config))
            yield {"scores": scores, "threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1)}

    sample, alone = questions.sample(answered, config.timed), replace(config, batch=1)
    record_all(file, sample, alone, progress, partial(make_question, lm, task), score)


def timing_scores(timings: Timings) -> dict[str, tuple[float, float]]:
    """The pairs of an answer's times; what it lacks is left out."""
    first = {"first_text": timings.first_text, "first_audio": timings.first_audio}
    out: dict[str, tuple[float, float]] = {name: (1000 * time, 1) for name, time in first.items() if time is not None}
    return out | ({"real_time_factor": (timings.total, timings.audio)} if timings.audio else {})


def stream_timings(lm: SpeechLM, item: Item, config: EvalConfig) -> Timings:
    """Streams an answer; returns its times."""
    events = lm.stream(item.question, item.task, seed=config.seed, system=item.system, **config.answering)
    return [event.timings for event in events if isinstance(event, Ended)][-1]


def answer_turns(
    lm: SpeechLM, questions: Questions, task: Task, config: EvalConfig, file: Path, progress: Progress = "off"
) -> None:
    """Holds the conversations that have no record yet, `config.batch` at a time, and appends their records to `file`."""

    def hold(asked: tuple[int, Row]) -> dict[str, Any]:
        index, row = asked
        record: dict[str, Any] = {}
        with noting_broken(record):
            record = {"source": row.source, "turns": _converse(lm, row, task, config, key(config.seed, index) % (1 << 31))}
        return record

    with ThreadPoolExecutor(config.batch) as pool:
        record_all(file, questions, config, progress, lambda index, row: (index, row), partial(pool.map, hold))


def _converse(lm: SpeechLM, row: Row, task: Task, config: EvalConfig, seed: int) -> list[dict[str, Any]]:
    """Holds one conversation; UserError where a turn lacks what the task needs, or the session has no room for it."""
    same, out = find_normaliser(config.normaliser, row.language), []
    with lm.session(seed=seed, system=row.system, pace="whole", **config.answering) as session:
        for number, turn in enumerate(row.turns):
            lacking = turn.lacks(task)
            if lacking is not None and not lacking.startswith("answer_codes"):
                raise UserError(f"turn {number} has no {lacking}, which {task.name} needs")
            spoken = turn.question_audio if task.question == "audio" else None
            answer = session.ask(turn.question_text if spoken is None else spoken.load(SAMPLE_RATE), task).answer()
            wanted = turn.written(task)
            texts = {"question": turn.question_text, "reference": wanted, "response": answer.text}
            out.append({**texts, "right": same(answer.text) == same(wanted)})
    return out
