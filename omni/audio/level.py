"""Measures the level of sound, and describes clips that are silent, very short, or cancelled by opposite channels.

Dimensions: S samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


QUIET_DBFS = -60.0
"""Below this level a clip counts as silent."""

SHORT_SECONDS = 0.1
"""Shortest clip in which anything can be said."""

_CANCELLED = 0.01  # share of the louder channel's energy that is left when opposite channels are averaged


def level(clip: Tensor, sample_rate: int) -> float:
    """Level of `[S]`, S at least 1, in decibels relative to full scale: the RMS of its loudest 100 ms without their mean (a
    constant is not heard); -inf for silence."""
    import torch

    window = max(1, round(SHORT_SECONDS * sample_rate))
    pieces = list(clip.float().split(window))
    whole = torch.stack(pieces[:-1]) if len(pieces) > 1 else clip.new_zeros(1, 1, dtype=torch.float32)
    power = max(float(whole.var(dim=1, correction=0).max()), float(pieces[-1].var(correction=0)) * len(pieces[-1]) / window)
    return 10 * math.log10(power) if power > 1e-20 else -math.inf


def sound_warnings(clip: Tensor, sample_rate: int) -> list[str]:
    """Reasons to doubt that anything is said in `[S]`, S at least 1, as ends of sentences about it."""
    found = []
    if (seconds := len(clip) / sample_rate) < SHORT_SECONDS:
        found.append(f"lasts {seconds * 1e3:.3g} ms, and nothing can be said in under {SHORT_SECONDS * 1e3:.0f} ms")
    if (loudest := level(clip, sample_rate)) < QUIET_DBFS:
        what = "is silence" if loudest == -math.inf else f"is silent: its loudest 100 ms reach {loudest:.0f} dBFS"
        found.append(f"{what}, and speech lies above {QUIET_DBFS:.0f} dBFS")
    return found


def cancelled(mixed: float, channels: Sequence[float]) -> int | None:
    """The loudest channel where the mean of all of them has lost nearly all sound (they are of opposite phase), from the
    energies of the mean and of each channel; else None."""
    loudest = max(range(len(channels)), key=channels.__getitem__)
    return loudest if mixed < _CANCELLED * channels[loudest] else None


def heard_alone(channel: int) -> str:
    """Text of the warning for the channel that `cancelled` names: the end of a sentence about the sound."""
    return f"two channels are of opposite phase and cancel each other; channel {channel} is used alone"
