"""Labels of the turn head: for each encoder frame, whether there is a voice, and whether the question has ended."""

from __future__ import annotations

import torch
from torch import Tensor

UNSURE = 2
"""Frames after the last with speech that have no label of the end: whether they belong to it is a matter of the threshold."""


def turn_labels(voice: Tensor, frames: int) -> Tensor:
    """Labels (voice, end) of a clip, [frames, 2] int8; 1, 0, or -1 for none.

    A frame has a voice where one of its feature frames has. All frames after the last voice are the end, but for the first
    `UNSURE`, which have no such label; a clip without a voice has none of the end.

    Args:
        voice: feature frames with speech, [F] bool, as many to each encoder frame; the last may lack some.
    """
    ratio = -(-len(voice) // frames)
    heard = torch.nn.functional.pad(voice, (0, ratio * frames - len(voice))).view(frames, ratio).any(1)
    labels = torch.stack([heard, torch.zeros_like(heard)], dim=1).to(torch.int8)
    spoken = heard.nonzero().flatten()
    if not len(spoken):
        labels[:, 1] = -1
        return labels
    last = int(spoken[-1]) + 1
    labels[last : last + UNSURE, 1] = -1
    labels[last + UNSURE :, 1] = 1
    return labels
