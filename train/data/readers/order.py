"""Tests the order of SNAC's codes in a frame on the codes of many rows.

One frame does not reveal the order: every level has the same range. Many rows do, since each level has a codebook of its own,
of which speech uses some codes more than others: places of one level share their frequent codes, places of two levels agree
only by chance. The known orders differ in the levels at places 2 and 4:

    streams   c0 c1 c2 c2 c1 c2 c2
    levels    c0 c1 c1 c2 c2 c2 c2

so one of the two shares the codes of places 3, 5 and 6, which are of the finest level either way. The unit of measurement is
how often those three agree with each other. Only different rows are compared, as pauses repeat a code within one. An order is
refused on overwhelming evidence alone: where codes are too few, or all equally frequent, it passes.

Tested on codes of residual quantisers with SNAC's strides and 256 or 1,024 codes, fitted to mel frames of recorded speech: of
720 samples in the right order none was refused, of 240 in the other with 64 rows of 25 frames 99 %, of 240 with 64 rows of 100
frames all. Codes of SNAC's published weights have not been seen.

Dimensions: R rows, 7 places, C codes of a codebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omni.codec.registry import CODECS
from omni.errors import UserError
from train.data.readers.codes import SHOWN
from train.data.readers.contract import Broken
from train.data.rows.row import Row

if TYPE_CHECKING:
    import numpy as np

ROWS = 64
"""Number of first rows that are tested."""

FEWEST_ROWS, FEWEST_FRAMES = 16, 400
"""Fewest rows and frames that are tested: fewer are no evidence."""

SURE = 6.0
"""Standard errors by which the evidence must exceed 0."""

_FINE = ((3, 5), (3, 6), (5, 6))
_SECOND, _FOURTH = tuple((2, k) for k in (3, 5, 6)), tuple((4, k) for k in (3, 5, 6))


def check_order(items: Iterable[Row | Broken], said: str, format: str) -> None:
    """Refuse SNAC codes that are in another order than the one their format documents (UserError).

    Args:
        items: the first `ROWS` of a data set; those without such codes do not count.
        said: the documented order.
    """
    import numpy as np

    rows, frames = [], []
    for item in items:
        if isinstance(item, Broken):
            continue
        codes = [turn.answer_codes for turn in item.turns if turn.answer_codes is not None]
        found = [code.frames.numpy() for code in codes if code.codec == "snac" and code.order == said]
        if found:
            rows.append(item.where)
            frames.append(np.concatenate(found, axis=1))
    total = sum(part.shape[1] for part in frames)
    if len(rows) < FEWEST_ROWS or total < FEWEST_FRAMES:
        return
    value, error = lean(frames, said)
    if value > max(0.5, SURE * error):
        other = next(name for name in SHOWN if name != said)
        raise UserError(
            f"the SNAC codes of {len(rows)} rows ({total} frames), {rows[0]} to {rows[-1]}, seem to be in the order "
            f"{other!r} ({SHOWN[other]}), not in {said!r} ({SHOWN[said]}) as {format} documents it: say --read.order {other}, "
            f"or --read.order {said} where they are right all the same"
        )


def lean(frames: Sequence[np.ndarray], said: str) -> tuple[float, float]:
    """Evidence in the codes [7, F] of R rows for the other order than `said`, and its standard error.

    About -1 where `said` is right and 1 where the other is; 0 where the codes do not decide. The error is the jackknife's over
    rows (infinite where no code is more frequent than others).
    """
    import numpy as np

    size = CODECS.find("snac").codebook_sizes[0]
    counts = np.stack([[np.bincount(place, minlength=size) for place in part] for part in frames]).astype(float)  # [R, 7, C]
    total = counts.sum(0)

    def excess(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
        """Excess of the agreement of two rows at these places over chance, [1 + R]: of all rows, then without each."""
        first, second = (list(part) for part in zip(*pairs, strict=True))
        within = np.einsum("rpc,rpc->r", counts[:, first], counts[:, second])
        rest = total - counts
        every = np.sum(total[first] * total[second]) - within.sum()
        without = np.einsum("rpc,rpc->r", rest[:, first], rest[:, second]) - (within.sum() - within)
        lengths = counts[:, 0].sum(-1)
        tried = len(pairs) * np.append(
            lengths.sum() ** 2 - (lengths**2).sum(),
            (lengths.sum() - lengths) ** 2 - ((lengths**2).sum() - lengths**2),
        )
        return size * np.append(every, without) / tried - 1

    fine, second, fourth = excess(_FINE), excess(_SECOND), excess(_FOURTH)
    if fine.min() <= 0:
        return 0.0, float("inf")
    values = ((fourth - second) if said == "streams" else (second - fourth)) / fine
    spread = values[1:] - values[1:].mean()
    return float(values[0]), float(np.sqrt((len(frames) - 1) / len(frames) * (spread**2).sum()))
