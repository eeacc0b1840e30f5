"""The model's own judgement of where a turn ends: its turn head, over the frames that are made of its sound while it comes.

A head that was trained on some voices is often sure of nothing with others. So what it says of the end counts after a least
silence, and where it does not know the voice, or does not clearly say that more must come, silence alone ends the turn.
"""

from __future__ import annotations

from omni.generate.turn_end import END, RULES, VOICE, TurnFrames

LEAST = {"low": 0.4, "medium": 0.3, "high": 0.3, "auto": 0.3}
"""Seconds of silence after which the head can end a turn, by eagerness."""

UNSURE = 1.05
"""Seconds of silence that end a turn of which the head is not sure: more than between the words of a sentence."""

KNOWN, HEARD = 0.99, 0.8
"""A voice is known where the head is so sure of it in most frames of the last speech, of so many seconds."""

MORE = 0.1
"""Probability of the end below which more must come."""


def has_ended(frames: TurnFrames | None, start: float, now: float, voiced: float, eagerness: str) -> bool | None:
    """Whether a turn has ended, as far as is known; None where the model does not judge it.

    Args:
        start, now, voiced: seconds of the input at which its sound begins, until which it was followed, and of the last speech.
    """
    if frames is None:
        return None
    second, voiced = now - start, voiced - start
    if second - voiced >= UNSURE and not waited_for(frames, second, voiced):
        return True
    return second - voiced >= LEAST[eagerness] and frames.ended(second, voiced, RULES[eagerness])


def waited_for(frames: TurnFrames, second: float, voiced: float) -> bool:
    """Whether more is waited for at a second of a turn whose last speech was at `voiced`: its frames come late, or the head
    knows who speaks and clearly says that more must come."""
    known, last, count = frames.known, int(voiced * frames.rate), int(HEARD * frames.rate)
    now = min(int(second * frames.rate), len(known))
    if now < last:
        return True
    speech, silence = known[max(last - count, 0) : last, VOICE], known[max(now - 2, 0) : now, END]
    return len(speech) == count and float(speech.median()) >= KNOWN and float(silence.mean()) < MORE
