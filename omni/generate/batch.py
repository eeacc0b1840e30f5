"""Answers many questions, a number of them at a time: as one ends, another takes its place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from omni.edit.deltas import Edits
from omni.engine.engine import Engine
from omni.engine.listener import Listener
from omni.errors import UserError
from omni.generate.options import AnswerOptions, check_numbers
from omni.generate.question import Asked, read_question, read_system
from omni.generate.results import Answer
from omni.generate.session import Session
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

PART = 8
"""Where one of that many parts of the places is free, the next questions come in together."""


@dataclass(frozen=True)
class QuestionBatch:
    """Questions as ids and sound, with what each has of its own; all lists are in their order."""

    asked: list[Asked]
    seeds: list[int]
    adapters: list[str | None]
    edits: list[Edits | None]
    systems: list[str]

    def options(self, number: int, common: AnswerOptions) -> AnswerOptions:
        """The options of one question (from 0), of those that all have in common."""
        return replace(common, adapter=self.adapters[number], seed=self.seeds[number], system=self.systems[number])


def read_batch(
    model: SpeechModel,
    tokenizer: Tokenizer,
    questions: Sequence[Any],
    task: Any,
    sample_rate: int,
    seed: Any,
    adapter: Any,
    edits: Any,
    system: Any,
) -> QuestionBatch:
    """Check and read the questions of `SpeechLM.generate`, whose arguments these are. UserError: a bad value, or another
    number of values than of questions."""
    values = {"tasks": task, "seeds": seed, "adapters": adapter, "edits": edits, "system messages": system}
    tasks, seeds, adapters, corrections, systems = (one_each(name, own, len(questions)) for name, own in values.items())
    for value in seeds:
        check_numbers(seed=value)
    asked = []
    for number, (question, own) in enumerate(zip(questions, tasks, strict=True), 1):
        try:
            asked.append(read_question(question, own, model, tokenizer, sample_rate))
        except UserError as error:
            raise UserError(f"question {number} of {len(questions)}: {error}") from error
    asked = [a.after(read_system(text, tokenizer)) for a, text in zip(asked, systems, strict=True)]
    return QuestionBatch(asked, seeds, adapters, corrections, systems)


def one_each(noun: str, value: Any, count: int) -> list[Any]:
    """Expands a value given once for all questions, or one per question, to a list; UserError for another number of values."""
    each = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value] * count
    if len(each) != count:
        raise UserError(f"{len(each)} {noun} for {count} questions; give one for all, or one each")
    return each


def check_lengths(lengths: Sequence[int], context: int) -> None:
    """Refuse a question that leaves no room for an answer, before any other is answered."""
    for number, length in enumerate(lengths, 1):
        if length >= context:
            raise UserError(
                f"question {number} of {len(lengths)} takes {length} positions, but the model's context has {context} "
                "and an answer needs some; shorten it, or leave it out"
            )


CHECK_SECONDS = 0.1
"""Seconds between two calls of the check in `checked`."""
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def checked(check: Callable[[], None]) -> Iterator[None]:
    """A context in which whoever waits for a batch of answers calls `check` again and again; what it raises ends the batch."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


def answer_all(engine: Engine, questions: Iterable[Callable[[], tuple[Session, Listener]]], at_once: int) -> list[Answer]:
    """One answer per question, in their order.

    Args:
        questions: each gives its session and the question laid out in it.
        at_once: number of questions that are answered at a time.
    """
    todo, answers = deque(enumerate(questions)), {}
    under: dict[int, tuple[Session, Listener]] = {}
    ended = threading.Event()
    try:
        while todo or under:
            free = at_once - len(under)
            if todo and (not under or free >= max(1, at_once // PART)):
                batch = {number: question() for number, question in (todo.popleft() for _ in range(min(free, len(todo))))}
                under |= batch
                for _, answer in batch.values():
                    answer.wake = _setter(answer, ended)
                engine.ask([session.begin(answer, "lay_out") for session, answer in batch.values()])
            while not ended.wait(None if (check := _CHECK.get()) is None else CHECK_SECONDS):
                if check is not None:
                    check()
            ended.clear()
            for number, (session, answer) in list(under.items()):
                if answer.ended:
                    answers[number] = session.whole(session.events_of(answer), answer)
                    session.close()
                    del under[number]
    finally:
        for session, _ in under.values():
            session.close()
    return [answers[number] for number in sorted(answers)]


def _setter(answer: Listener, ended: threading.Event) -> Callable[[], None]:
    return lambda: ended.set() if answer.ended else None
