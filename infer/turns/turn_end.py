"""The model's own judgement of where a turn ends: its turn head, over the frames that are made of its sound while it comes."""

from __future__ import annotations

from omni.generate.turn_end import RULES, TurnFrames


def has_ended(frames: TurnFrames | None, start: float, now: float, voiced: float, eagerness: str) -> bool | None:
    """Whether a turn has ended, as far as is known; None where the model does not judge it.

    Args:
        start, now, voiced: seconds of the input at which its sound begins, until which it was followed, and of the last speech.
    """
    return None if frames is None else frames.ended(now - start, voiced - start, RULES[eagerness])
