"""Packs clips of different lengths for the encoder, so that no layer computes padding.

Every linear layer works on rows, one per frame that exists. Only two operations mix frames: the
convolutions, for which the clips lie one behind the other with silence between them, and attention, for
which clips of similar length are batched side by side:

    clips     a a a a a   b b b                  5 and 3 feature frames
    slots     a a a a a . b b b .                even length, at least one empty frame behind each clip
    frames    A A A B B                          what the second convolution (stride 2) leaves, gaps dropped
    attention one call over the clips' bounds in half precision on a GPU; else one group per length, or padded
              groups with a key mask where launches cost more than arithmetic

Built on the host from lengths alone; nothing here waits for a device.

N clips, F feature frames, T encoder frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from omni.model.attention import PackedRows
from omni.utils.hardware import to_device

EQUAL_LENGTHS = 1.0
"""Group ratio on a CPU: only clips of one length share a call, so attention does no padded work either.
Measured at 64 clips of 0.6 to 3 s, width 128, one core, forward and backward of one attention: 45 ms
against 72 ms for one padded, masked call (width 256: 71 ms against 128 ms)."""

FEW_LAUNCHES = 2.0
"""Group ratio on an accelerator: clips up to twice as long as the shortest share a masked call, so that
seven calls serve every mixture of 0.3 s and 30 s."""


@dataclass(frozen=True)
class AttentionGroup:
    """Neighbouring clips that attend in one call (each to itself only)."""

    rows: int
    """Frames of the group."""
    clips: int
    longest: int
    """Frames of its longest clip: the group is `[clips, longest]` when set side by side."""
    index: Tensor | None
    """`[rows]`: index of each frame in `clips * longest`. None: all clips are equally long, nothing moves."""
    mask: Tensor | None
    """`[clips, 1, 1 or longest, longest]` bool: keys that exist, and that a frame of a chunk hears. None: all."""


class Chunks(NamedTuple):
    """Chunks of a clip, each of which hears itself and what came before.

    Attributes:
        size: frames of a chunk.
        history: frames before its chunk that a frame hears; None for all of them.
    """

    size: int
    history: int | None = None

    def heard(self, frames: int) -> Tensor:
        """`[frames, frames]` bool: which frames (columns) each frame hears."""
        index = torch.arange(frames)
        start = index // self.size * self.size
        heard = index[None] < start[:, None] + self.size
        return heard if self.history is None else heard & (index[None] >= start[:, None] - self.history)


class Near(NamedTuple):
    """Each frame hears those at most `size` before and after it."""

    size: int

    def heard(self, frames: int) -> Tensor:
        """`[frames, frames]` bool, see `Chunks.heard`."""
        index = torch.arange(frames)
        return (index[None] - index[:, None]).abs() <= self.size


@dataclass(frozen=True)
class Packing:
    """Index tensors of one batch, on the encoder's device. Inside, clips are ordered from short to long."""

    source: Tensor
    """`[slots]`: row of the flattened features `[N * F max]` under each slot; of gaps, which `gaps` silences, 0."""
    gaps: Tensor
    """`[slots, 1]` bool: false where a clip lies. Filled, not multiplied: a clip with NaN leaves its neighbours alone."""
    kept: Tensor
    """`[sum T]`: outputs of the second convolution that belong to a clip."""
    positions: Tensor
    """`[sum T]`: position of each frame in its clip."""
    groups: list[AttentionGroup]
    """Empty where `clips` is given."""
    clips: PackedRows | None
    output: Tensor
    """`[sum frames]`: the frames asked for, clips in the caller's order."""


def pack(
    mel_lengths: Sequence[int],
    frames: Sequence[int],
    mel_stride: int,
    *,
    ratio: float,
    device: torch.device,
    bounds: bool = False,
    gap: int = 1,
    chunks: Chunks | Near | None = None,
) -> Packing:
    """Builds the index tensors of a batch of N clips of `mel_lengths` feature frames (each at least 1), `mel_stride` apart.

    Args:
        frames: number of encoder frames of each clip to return, at most ceil(F / 2).
        ratio: of the longest to the shortest clip of an `AttentionGroup`.
        bounds: give attention the clips' bounds instead of groups.
        gap: least number of empty slots behind each clip.
        chunks: which frames of its clip a frame hears; None for all."""
    order = sorted(range(len(mel_lengths)), key=lambda clip: mel_lengths[clip])
    lengths = torch.tensor([mel_lengths[clip] for clip in order], dtype=torch.long)
    slots = (lengths + gap + 1) // 2 * 2
    tokens = (lengths + 1) // 2
    starts = slots.cumsum(0) - slots
    within = _ragged_arange(slots)
    live = within < lengths.repeat_interleave(slots)
    source = torch.tensor(order, dtype=torch.long).repeat_interleave(slots) * mel_stride + within
    positions = _ragged_arange(tokens)

    first = torch.zeros(len(order), dtype=torch.long)  # the first row of each of the caller's clips
    first[order] = tokens.cumsum(0) - tokens
    wanted = torch.tensor(list(frames), dtype=torch.long)
    bounds = bounds and len(order) > 0
    ends = torch.cat([tokens.new_zeros(1), tokens.cumsum(0)]).int()
    return Packing(
        source=to_device(source * live, device),
        gaps=to_device(~live[:, None], device),
        kept=to_device((starts // 2).repeat_interleave(tokens) + positions, device),
        positions=to_device(positions, device),
        groups=[] if bounds else _groups(tokens.tolist(), ratio, chunks, device),
        clips=PackedRows(to_device(ends, device), int(tokens[-1]), causal=False) if bounds else None,
        output=to_device(first.repeat_interleave(wanted) + _ragged_arange(wanted), device),
    )


def _groups(tokens: list[int], ratio: float, chunks: Chunks | Near | None, device: torch.device) -> list[AttentionGroup]:
    """Cut ascending lengths into runs whose longest is at most `ratio` times their shortest."""
    groups = []
    start = 0
    while start < len(tokens):
        end = start
        while end < len(tokens) and tokens[end] <= tokens[start] * ratio:
            end += 1
        clips, longest = end - start, tokens[end - 1]
        index = mask = None
        if chunks is not None and (chunks.size < longest):
            mask = chunks.heard(longest)[None, None]
        if tokens[start] < longest:
            lengths = torch.tensor(tokens[start:end], dtype=torch.long)
            index = to_device((torch.arange(clips) * longest).repeat_interleave(lengths) + _ragged_arange(lengths), device)
            exist = (torch.arange(longest) < lengths[:, None])[:, None, None]
            # A row of no frame, which is dropped afterwards, hears something: else its gradient is not a number.
            mask = exist if mask is None else mask & exist | ~exist.transpose(2, 3)
        mask = None if mask is None else to_device(mask, device)
        groups.append(AttentionGroup(sum(tokens[start:end]), clips, longest, index, mask))
        start = end
    return groups


def _ragged_arange(lengths: Tensor) -> Tensor:
    """`[sum lengths]`: 0, 1, … up to each length in turn."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
