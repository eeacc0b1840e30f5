"""Answers that are cut, as listeners cut them who interrupt: what of them was heard, and so stays in a conversation.

A cut answer is written as the whole layout of what was heard (`omni/layout.py` draws it). Sound is cut at a random frame. Of
the text stay the words whose middle was heard, as sessions have it, where it is known when each is said (`RowTurn.words`), or
else as large a part of the tokens as of the frames. What is only written is cut at a random token.

Dimensions: A audio streams, F frames.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from omni.tasks import Turn
from omni.text import Tokenizer
from train.data.rows.row import RowTurn


def interrupted(turn: Turn, row: RowTurn, tokenizer: Tokenizer, frame_rate: float, rng: random.Random) -> Turn:
    """The turn with its answer cut where `rng` says: before its last frame, or its last token where nothing is spoken.

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
    """Characters of the answer's text up to the end of the last word whose middle was heard by then; None where the words'
    times are not known, or are those of other words."""
    end, said = 0, [word for word in row.words if word.who == "model"]
    for word in said:
        if (word.start + word.end) / 2 > seconds:
            break
        place = row.answer_text.find(word.text, end)
        if place < 0:
            return None
        end = place + len(word.text)
    return end if said else None


def _tokens(text: Sequence[int], characters: int, tokenizer: Tokenizer) -> int:
    """The fewest tokens that hold so many characters."""
    return bisect_left(range(len(text)), characters, key=lambda count: len(tokenizer.decode(text[:count])))
