"""The past of a conversation as columns: what was asked and what of the answers was delivered.

The past is kept as turns. A cache is only a memory of columns that were fed, so what it must hold is laid out
anew from the turns for each question, and compared with what it does hold: an answer that was cut short, or
fed otherwise than the offline layout has it, differs from some column on, and from there it is fed again.

Dimensions: K streams, C columns, N features, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from omni.layout import Layout
from omni.tasks import Columns, Turn, answer, join, prompt

Key = tuple[int, ...]
"""What a column is: its K ids, the number of the exchange whose features stand in it, and which; -1 and -1 for none."""


@dataclass(frozen=True)
class Exchange:
    """A turn, the features [N, W] of its spoken question, its number in the conversation, and that question [S] at 16 kHz."""

    turn: Turn
    features: Tensor | None
    number: int
    clip: Tensor | None = None


def lay_out(layout: Layout, past: Sequence[Exchange], asked: Exchange, system: Sequence[int] = ()) -> tuple[Columns, list[Key]]:
    """All columns from the conversation's beginning to the end of the new question's prompt, and their keys.

    Args:
        system: token ids of the system message, which comes before whatever turn is the first now.
    """
    pieces, keys = [], []
    for number, exchange in enumerate((*past, asked)):
        parts = [prompt(layout, replace(exchange.turn, system=() if number else system))]
        if exchange is not asked:
            parts.append(answer(layout, exchange.turn))
        for part in parts:
            pieces.append(part)
            for column, index in zip(part.tokens.T.tolist(), part.feature_index.tolist(), strict=True):
                keys.append((*column, exchange.number if index >= 0 else -1, index))
    return join(pieces), keys


def written_key(column: Sequence[int]) -> Key:
    """The key of a column that a step wrote."""
    return (*column, -1, -1)


def common_prefix(a: Sequence[Key], b: Sequence[Key]) -> int:
    """How many columns two sequences begin with alike."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
