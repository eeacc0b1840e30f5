"""Cuts answers at a random place, as a user who interrupts does: only the part that was played stays in the conversation.

A cut answer is laid out as a whole answer of that part (`omni/layout.py` draws it). Sound is cut at a random frame. Where
word times are known (`RowTurn.words`), the text keeps the words whose middle was played, as sessions do; otherwise it keeps the
same share of its tokens as of the frames. Answers without sound are cut at a random token.

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
    """Number of characters of the answer's text up to the end of the last word whose middle is before `seconds`.

    None where the words' times are not known, or are those of other words.
    """
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
    """Smallest number of tokens that hold so many characters."""
    return bisect_left(range(len(text)), characters, key=lambda count: len(tokenizer.decode(text[:count])))
