"""Whether one more live answer fits: by the lateness that was measured, never by a guess.

With n live rows of which the 99th percentile of lateness is L, and a step that takes c longer with one more row, another is let
in while L + c < 0, and while a step with it takes no longer than a frame plays. What a step takes is known from the engine's
own steps; where these had less than half of the rows that are asked about, from what `Engine.measure` found or kept. Where
neither says anything, it is let in.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni.engine.stats import Recorder

RECENT = 512
"""Newest chunks whose lateness counts."""

FEW = 32
"""Chunks before which their lateness says nothing."""

SHARE = 0.9
"""Part of a frame's time that steps may take; the rest is for questions that come in."""


@dataclass(frozen=True)
class Verdict:
    """Attributes: fits: whether one more does; why: what speaks against it, "" where nothing does."""

    fits: bool
    why: str = ""


def admit(recorder: Recorder, live: int, frame: float) -> Verdict:
    """Judge one more live answer.

    Args:
        live: answers that somebody hears at present.
        frame: seconds of a frame of sound.
    """
    if not live:
        return Verdict(True)
    step, each = _step(recorder, live + 1)
    if step > SHARE * frame:
        return Verdict(False, f"a step of {live + 1} rows takes {1e3 * step:.0f} ms, a frame plays {1e3 * frame:.0f} ms")
    measured = recorder.late(RECENT, FEW)
    if measured is not None and (late := measured + each) >= 0:
        return Verdict(False, f"1 % of the sound of {live} listeners is {1e3 * late:.0f} ms late or more with one more")
    return Verdict(True)


def _step(recorder: Recorder, rows: int) -> tuple[float, float]:
    """Seconds of a step of that many rows, and of the last of them; 0 where nothing is known."""
    cost = recorder.cost()
    known = None if recorder.known is None else recorder.known.costs
    if known is not None and (cost is None or 2 * recorder.most_rows() < rows):
        step = known.seconds(rows)
        return step, max(step - known.seconds(rows - 1), 0.0)
    fixed, each = cost or (0.0, 0.0)
    return fixed + each * rows, each
