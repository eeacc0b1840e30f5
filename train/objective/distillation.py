"""Distils an encoder that hears in chunks from the one it started as, which hears whole clips (Hinton et al. 2015, on frames).

No transcript is needed. The teacher has the student's own features and causal convolutions, so that frames belong to the same
moments: its frames are Whisper's of a sound that begins 12.5 ms later (10 by the convolutions, 2.5 by the spectrum's window).

T frames of all clips, D width.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor, nn

from omni.encoder.base import Encoder
from omni.lora.attach import BASE, using

TEACHER = "teacher."
"""Start of the names of a teacher's weights in the objective."""


class Teacher(nn.Module):
    """An encoder's first weights, which hear whole clips. It is frozen, and part of no checkpoint and no exported model.

    Args:
        encoder: a copy with these weights, see `frozen`; None where the student has them itself, below its adapters.
        padded: it hears each clip in its window, the silence behind included, as it did where the weights came from.
    """

    def __init__(self, encoder: Encoder | None = None, padded: bool = False) -> None:
        super().__init__()
        self.encoder, self.padded = encoder, padded

    def forward(self, student: Encoder, features: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
        """Frames [T, D] of a batch's clips without graph; for the arguments see `Encoder.forward`."""
        with using(BASE):
            return (student if self.encoder is None else self.encoder).hear_whole(features, lengths, frames, self.padded)


def frozen(encoder: Encoder) -> Encoder:
    """A copy of an encoder that is not trained; of fake tensors too, which `deepcopy` alone would give a mode of their own."""
    values = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in encoder.parameters()}
    return copy.deepcopy(encoder, {**values, **{id(b): b.detach().clone() for b in encoder.buffers()}})
