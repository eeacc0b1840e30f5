"""The model's own judgement of where a turn ends, for `semantic_vad`: its turn head, over the frames that the engine makes of a
turn's sound while somebody speaks."""

from __future__ import annotations

from infer.serve.realtime.turn_sound import TurnSound
from omni.generate.turn_end import RULES


def has_ended(turn: TurnSound | None, start: float, now: float, voiced: float, eagerness: str) -> bool | None:
    """Whether a turn has ended, as far as is known; None where the model does not judge it.

    Args:
        start, now, voiced: seconds of the input at which its sound begins, until which it was followed, and of the last speech.
    """
    frames = None if turn is None else turn.frames
    return None if frames is None else frames.ended(now - start, voiced - start, RULES[eagerness])
