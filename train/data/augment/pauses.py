"""Voice and silence in log-mel features: which frames are speech, where words part, and silence that is put in.

Features are Whisper's, x = (log10(power) + 4) / 4. M mel bands, F feature frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RANGE = 3.0
"""Log10 of power (30 dB) by which a frame of speech may lie below the clip's loudest."""

FAINTEST = -6.0
"""Log10 of the mean power of the faintest speech: 10 dB above the fixed floor of features (`omni.audio.mel.FIXED_FLOOR`)."""

GAP = 1.5
"""Log10 of power (15 dB) by which a place between words lies below the clip's loudest frame, at least."""

AROUND = 3
"""Feature frames on either side of such a place that are no quieter."""


def energy(mel: Tensor) -> Tensor:
    """Log10 of the power of each frame of features [M, F], averaged over the bands: [F]."""
    return torch.pow(10.0, 4 * mel.float() - 4).mean(0).log10()


def speech(mel: Tensor) -> Tensor:
    """Frames of clean features [M, F] with speech, [F] bool: those within `RANGE` of the loudest and above `FAINTEST`."""
    power = energy(mel)
    return power >= power.max().clamp_min(FAINTEST + RANGE) - RANGE


def gaps(mel: Tensor, voice: Tensor) -> list[int]:
    """Places f of features [M, F] where words may part: the quietest frames around, between the first and last with speech."""
    spoken = voice.nonzero().flatten()
    if not len(spoken):
        return []
    power = energy(mel)
    low = -torch.nn.functional.max_pool1d(-power[None], 2 * AROUND + 1, 1, AROUND)[0]
    quiet = (power == low) & (power <= power.max() - GAP)
    quiet[: spoken[0] + 1] = quiet[spoken[-1] :] = False
    found = quiet.nonzero().flatten().tolist()
    return [f for f in found if not quiet[f - 1]]  # of a run, the first


def insert(x: Tensor, places: Sequence[tuple[int, int]], value: float | bool) -> Tensor:
    """Puts runs of equal values into [..., F].

    Args:
        places: (f, length) of each run, which comes before frame f; ascending.
    """
    pieces, start = [], 0
    for place, length in places:
        pieces += [x[..., start:place], x.new_full((*x.shape[:-1], length), value)]
        start = place
    return torch.cat([*pieces, x[..., start:]], dim=-1)
