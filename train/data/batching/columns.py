"""Makes the columns of a turn as `omni.tasks.example` does, at a third of the cost, by caching frequent parts.

A prompt with a spoken question depends on its length alone, and short answers repeat. Cached parts must not be modified.

Dimensions: K streams, C columns, A audio streams, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from omni.layout import IGNORE, Layout
from omni.tasks import Columns, Turn, answer, find_task, join, prompt, system_message

SHORT = 512
"""Longest answer that is cached, in codes and text ids together; also the longest question, in text ids."""


def turn_columns(layout: Layout, turn: Turn) -> Columns:
    """Make the columns of one turn; equals `example(layout, [turn])`."""
    asked = question_columns(layout, turn)
    replied = _answer(layout, turn)
    begin, end = len(asked), len(asked) + len(replied)
    targets = torch.full((len(layout), end), IGNORE)
    targets[:, begin - 1 : end - 1] = replied.targets  # each column's target is the next column's token
    return Columns(
        tokens=torch.cat([asked.tokens, replied.tokens], dim=1),
        targets=targets,
        feature_index=torch.cat([asked.feature_index, replied.feature_index]),
        features=asked.features,
    )


def question_columns(layout: Layout, turn: Turn) -> Columns:
    """Make the columns of a turn's question and of the system message before it, without targets."""
    task = find_task(turn.task)
    asked = (
        _audio_prompt(layout, task.name, turn.features)
        if task.question == "audio"
        else _text_prompt(layout, task.name, turn.question)
    )
    return join([_system_prompt(layout, tuple(turn.system)), asked]) if len(turn.system) else asked


def _answer(layout: Layout, turn: Turn) -> Columns:
    task = find_task(turn.task)
    text = tuple(turn.text) if task.text and turn.text is not None else None
    codes = turn.codes if task.audio else None
    if turn.cut or len(text or ()) + (0 if codes is None else codes.numel()) > SHORT:  # a cut answer hardly repeats
        return answer(layout, turn)
    frames = None if codes is None else (codes.to(torch.int32).numpy().tobytes(), *codes.shape)
    return _kept(layout, task.name, text, frames)


@lru_cache(maxsize=256)  # system messages are few, and each precedes many questions
def _system_prompt(layout: Layout, system: tuple[int, ...]) -> Columns:
    return system_message(layout, system)


@lru_cache(maxsize=4096)
def _audio_prompt(layout: Layout, task: str, features: int) -> Columns:
    return prompt(layout, Turn(task, features=features))


def _text_prompt(layout: Layout, task: str, question: Sequence[int]) -> Columns:
    if len(question) > SHORT:
        return prompt(layout, Turn(task, question=question))
    return _kept_question(layout, task, tuple(question))


@lru_cache(maxsize=4096)
def _kept_question(layout: Layout, task: str, question: tuple[int, ...]) -> Columns:
    return prompt(layout, Turn(task, question=question))


@lru_cache(maxsize=8192)  # a thousand utterances, each answered as several tasks
def _kept(layout: Layout, task: str, text: tuple[int, ...] | None, frames: tuple[bytes, int, int] | None) -> Columns:
    codes = None
    if frames is not None:
        data, streams, count = frames
        codes = torch.frombuffer(bytearray(data), dtype=torch.int32).view(streams, count).long() if data else None
        codes = torch.empty(streams, count, dtype=torch.long) if codes is None else codes
    return answer(layout, Turn(task, text=text, codes=codes))
