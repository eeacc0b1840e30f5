"""Makes the columns of a turn as `omni.tasks.example` does, at a third of the cost, by caching frequent parts; cuts answers.

A prompt with a spoken question depends on its length alone, and short answers repeat. Cached parts must not be modified.

An answer is cut at a random place, as a user who interrupts does: only the part that was played stays in the conversation, laid
out as a whole answer of that part (`omni/layout.py` draws it). Sound is cut at a random frame. Where word times are known
(`RowTurn.words`), the text keeps the words whose middle was played, as sessions do; otherwise it keeps the same share of its
tokens as of the frames. Answers without sound are cut at a random token.

Dimensions: K streams, C columns, A audio streams, F frames.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from omni.layout import IGNORE, Layout
from omni.tasks import Columns, Turn, answer, find_task, join, prompt, system_message
from omni.text import Tokenizer
from train.data.rows.row import RowTurn

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


def interrupted(turn: Turn, row: RowTurn, tokenizer: Tokenizer, frame_rate: float, rng: random.Random) -> Turn:
    """Cut the turn's answer at a place drawn from `rng`: before its last frame, or its last token where it has no sound.

    Args:
        row: the same turn as stored.
        frame_rate: of the codes, frames a second.
    """
    text, codes = turn.text, turn.codes
    if codes is None:
        return replace(turn, text=text[: rng.randrange(len(text))] if text else text, cut=True)
    total = codes.shape[1]
    frames = rng.randrange(total) if total else 0
    if text is not None:
        characters = heard(row, frames / frame_rate)
        kept = math.ceil(len(text) * frames / max(1, total)) if characters is None else _tokens(text, characters, tokenizer)
        text = text[:kept]
    return replace(turn, text=text, codes=codes[:, :frames], cut=True)


def heard(row: RowTurn, seconds: float) -> int | None:
    """Number of characters of the answer's text up to the end of the last word whose middle is before `seconds`. None where the
    words' times are not known, or are those of other words."""
    end, said = 0, [word for word in row.words if word.who == "model"]
    for word in said:
        if (word.start + word.end) / 2 > seconds:
            break
        offset = row.answer_text.find(word.text, end)
        if offset < 0:
            return None
        end = offset + len(word.text)
    return end if said else None


def _tokens(text: Sequence[int], characters: int, tokenizer: Tokenizer) -> int:
    """Smallest number of tokens whose text has at least `characters` characters."""
    return bisect_left(range(len(text)), characters, key=lambda count: len(tokenizer.decode(text[:count])))
