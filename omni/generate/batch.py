"""Answers many questions, a number of them at a time: as one ends, another takes its place."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from omni.engine.client import Running
from omni.engine.engine import Engine
from omni.errors import UserError
from omni.generate.results import Answer
from omni.generate.session import Session

PART = 8
"""Where one of that many parts of the places is free, the next questions come in together."""


def one_each(what: str, given: Any, count: int) -> list[Any]:
    """Expands a value given once for all questions, or one per question, to a list; UserError for another number of values."""
    each = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given] * count
    if len(each) != count:
        raise UserError(f"{len(each)} {what} for {count} questions; give one for all, or one each")
    return each


def check_lengths(lengths: Sequence[int], context: int) -> None:
    """Refuse a question that leaves no room for an answer, before any other is answered."""
    for number, length in enumerate(lengths, 1):
        if length >= context:
            raise UserError(
                f"question {number} of {len(lengths)} takes {length} positions, but the model's context has {context} "
                "and an answer needs some; shorten it, or leave it out"
            )


def answer_all(engine: Engine, questions: Iterable[Callable[[], tuple[Session, Running]]], at_once: int) -> list[Answer]:
    """One answer per question, in their order.

    Args:
        questions: each gives its session and the question laid out in it.
        at_once: number of questions that are answered at a time.
    """
    todo, answers = deque(enumerate(questions)), {}
    under: dict[int, tuple[Session, Running]] = {}
    ended = threading.Event()
    try:
        while todo or under:
            free = at_once - len(under)
            if todo and (not under or free >= max(1, at_once // PART)):
                some = [todo.popleft() for _ in range(min(free, len(todo)))]
                under |= {number: question() for number, question in some}
                for number, _ in some:
                    running = under[number][1]
                    running.pace, running.wake = "whole", _setter(running, ended)
                engine.ask([under[number][1] for number, _ in some])
            ended.wait()
            ended.clear()
            for number, (session, running) in list(under.items()):
                if _is_over(running):
                    answers[number] = session.gather(running)
                    session.close()
                    del under[number]
    finally:
        for session, _ in under.values():
            session.close()
    return [answers[number] for number in sorted(answers)]


def _is_over(running: Running) -> bool:
    return running.over or running.cancelled or running.failure is not None


def _setter(running: Running, ended: threading.Event) -> Callable[[], None]:
    return lambda: ended.set() if _is_over(running) else None
