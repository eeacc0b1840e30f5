"""Asks every question once and scores its answer, one record each.

A record is plain data: `index` and `where` in the data, what was asked, expected, written and heard (by the ASR), and `scores`,
the pairs of the measures (see `measures`). An item that cannot be asked has `broken`, the reason, instead; the others are not
affected.

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.question import SAMPLE_RATE, read_question, read_system
from omni.generate.results import Answer
from omni.generate.speech_lm import SpeechLM
from omni.stores.tries import StoreError
from omni.tasks import Task, prompt
from train.console.progress import Display
from train.data.readers import Broken
from train.data.rows.row import Row
from train.data.seeding import key
from train.eval import metrics
from train.eval.config import EvalConfig, Progress
from train.eval.held_out import Item
from train.eval.journal import Journal
from train.eval.questions import GivenRow, Questions
from train.scoring.asr import ASR, transcript
from train.scoring.text import compare_codes, find_normaliser, text_errors


@dataclass(frozen=True)
class EvalQuestion:
    """A question ready to be asked, with its row and index in the data."""

    index: int
    row: Row
    item: Item

    @property
    def seconds(self) -> float:
        """Length of the spoken question."""
        return len(self.item.question) / SAMPLE_RATE if isinstance(self.item.question, Tensor) else 0.0


def make_item(row: Row, task: Task, lm: SpeechLM) -> Item:
    """Makes a question with its references of the first turn of a row, and checks that it fits the model.

    Raises:
        UserError: it has no question of the task's kind, or one that cannot be read or leaves no room for an answer.
    """
    turn = row.turns[0]
    question: str | Tensor
    if task.question == "audio":
        if turn.question_audio is None:
            raise UserError(f"has no question_audio, which {task.name} asks by")
        question = turn.question_audio.load(SAMPLE_RATE)
        lm.config.encoder.clips(len(question))
    else:
        if not turn.question_text.strip():
            raise UserError(f"has no question_text, which {task.name} asks by")
        question = turn.question_text
    asked = read_question(question, task, lm.model, lm.tokenizer).after(read_system(row.system, lm.tokenizer))
    columns = len(prompt(lm.layout, asked.turn))
    if columns >= lm.config.decoder.context:
        raise UserError(f"takes {columns} positions, and the model's context has {lm.config.decoder.context}")
    expected = turn.written(task) if task.text else turn.question_text
    codes = None
    if task.audio and lm.codec is not None and turn.answer_codes is not None and turn.answer_codes.codec == lm.codec.name:
        codes = turn.answer_codes.for_codec(lm.codec)
    return Item(task.name, question, turn.question_text, expected or None, codes, system=row.system)


def answer_all(
    lm: SpeechLM, questions: Questions, task: Task, config: EvalConfig, asr: ASR | None, file: Path, progress: Progress
) -> None:
    """Asks the questions that have no record yet, and appends their records to `file`."""
    journal = Journal(file, config.batch, len(questions))
    if journal.done == len(questions):
        return
    display = Display(len(questions), journal.done, progress)
    items = questions.iterate(journal.done)
    try:
        while batch := [item for _, item in zip(range(config.batch), items, strict=False)]:
            records, seconds = _answer(lm, batch, task, config, asr)
            journal.append(records)
            display.tick(len(records), seconds)
    finally:
        display.close()


def _answer(
    lm: SpeechLM, batch: Sequence[tuple[int, Row | Broken]], task: Task, config: EvalConfig, asr: ASR | None
) -> tuple[list[dict[str, Any]], float]:
    """The records of a batch in its order, and the seconds of its questions."""
    records: dict[int, dict[str, Any]] = {}
    asked: list[EvalQuestion] = []
    for index, row in batch:
        if isinstance(row, Broken):
            records[index] = {"index": index, "where": row.where, "broken": row.why}
            continue
        try:
            asked.append(EvalQuestion(index, row, make_item(row, task, lm)))
        except StoreError:
            raise
        except (ValueError, OSError) as error:  # a path that is none, such as one with NUL, is a plain ValueError
            records[index] = {"index": index, "where": row.where, "broken": " ".join(str(error).split())}
    answers = ask(lm, asked, config, sound=asr is not None or any(metric.sound for metric in metrics.METRICS.values()))
    for one, answer in zip(asked, answers, strict=True):
        records[one.index] = judge(one, answer, task, config, asr, lm.codec)
    return [records[index] for index, _ in batch], sum(one.seconds for one in asked)


def ask(lm: SpeechLM, asked: Sequence[EvalQuestion], config: EvalConfig, sound: bool) -> list[Answer]:
    """Answers questions in batches; each is sampled with its own seed."""
    if not asked:
        return []
    return lm.generate(
        [one.item.question for one in asked],
        [one.item.task for one in asked],
        sampling=config.sampling,
        seed=[key(config.seed, one.index) % (1 << 31) for one in asked],
        max_seconds=config.max_seconds,
        max_tokens=config.max_tokens,
        batch_size=config.batch,
        sound=sound,
        system=[one.item.system for one in asked],
    )


@torch.no_grad()
def judge(
    one: EvalQuestion, answer: Answer, task: Task, config: EvalConfig, asr: ASR | None = None, codec: AudioCodec | None = None
) -> dict[str, Any]:
    """Scores an answer; returns its record. With a codec, the ASR also recognises the reference's codes."""
    row, item, normaliser = one.row, one.item, find_normaliser(config.normaliser)
    scores: dict[str, tuple[float, float]] = {"ended": (float(answer.ended == "end"), 1)}
    reference = None if item.text is None else normaliser(item.text)
    written = normaliser(answer.text)
    if reference is not None and task.text:
        unit, errors, size = text_errors(reference, written, row.language)
        scores[unit] = (errors, size)
        scores["exact_match"] = (float(reference == written), 1)
    if item.codes is not None:
        scores["code_accuracy"] = compare_codes(item.codes, answer.codes)
    heard = None
    if asr is not None and task.audio:
        heard = transcript(asr, answer.audio, answer.sample_rate, row.language)
        said = normaliser(heard)
        if reference is not None:
            scores["speech_wer"] = text_errors(reference, said, row.language)[1:]
            if item.codes is not None and codec is not None:
                right = transcript(asr, codec.decode(item.codes), codec.sample_rate, row.language)
                scores["ear_wer"] = text_errors(reference, normaliser(right), row.language)[1:]
        if task.text:
            scores["speech_text_wer"] = text_errors(written, said, row.language)[1:]
    scores |= metrics.scores(item, answer, row)
    record: dict[str, Any] = {
        "index": one.index,
        "where": row.where,
        "id": row.id,
        "language": row.language,
        "speaker": row.speaker,
        "question": item.question_text,
        "reference": item.text,
        "response": answer.text,
        "heard": heard,
        "ended": answer.ended,
        "seconds": round(one.seconds, 3),
        "scores": scores,
    }
    if isinstance(row, GivenRow):
        record["given"] = {name: value for name, value in row.given.items() if not isinstance(value, bytes)}
    return record
