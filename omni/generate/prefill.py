"""Prefill: writes prompts into the cache and returns only the hidden state of each prompt's last column.

Prompts of different lengths are right-aligned in one batch, filled up at the front with columns at position
-1, which write nothing; so every row's last column is the batch's last. `prefill_fork` serves two rows whose
prompts differ in the last column only: one sequence of T + 1 columns instead of two of T.

Dimensions: B rows, K streams, T columns, S slots, H key/value heads, D size of a head, N features, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omni.kv_cache import KVCache
from omni.layout import Layout
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns


class Prompt(NamedTuple):
    """Prompts of several rows as they are fed, on the host (features excepted).

    Attributes:
        tokens: [B, K, T].
        input_pos: positions of the columns in their rows, [B, T]; -1 is padding.
        features: encoder features of all clips, [N, W], None where no question is spoken.
        feature_index: which feature a column takes, [B, T], -1 for none.
    """

    tokens: Tensor
    input_pos: Tensor
    features: Tensor | None
    feature_index: Tensor


def pack(layout: Layout, prompts: Sequence[Columns], features: Sequence[Tensor], starts: Sequence[int] | None = None) -> Prompt:
    """Right-align prompts in one batch.

    Args:
        prompts: one per row; their feature indices count over the row's own clips.
        features: [n, W] of all clips of all rows, in order.
        starts: number of columns of each row that the cache holds already; only the rest is fed.
    """
    starts = starts or [0] * len(prompts)
    time = max(len(p) - s for p, s in zip(prompts, starts, strict=True))
    tokens = layout.ids("pad")[:, None].repeat(len(prompts), 1, time)
    position = torch.full((len(prompts), time), -1)
    index = torch.full((len(prompts), time), -1)
    offset = 0
    for i, (p, start) in enumerate(zip(prompts, starts, strict=True)):
        n = len(p) - start
        tokens[i, :, time - n :] = p.tokens[:, start:]
        position[i, time - n :] = torch.arange(start, len(p))
        own = p.feature_index[start:]
        index[i, time - n :] = torch.where(own >= 0, own + offset, -1)
        offset += sum(p.features)
    return Prompt(tokens, position, torch.cat(list(features)) if features else None, index)


@torch.inference_mode()
def prefill(model: SpeechModel, cache: KVCache, rows: range, prompt: Prompt, chunk: int = 512) -> Hidden:
    """Write prompts into neighbouring rows of the cache, `chunk` columns at a time; returns the last hidden state [B, 1, W]."""
    view = cache.select(rows)
    device, time = model.device, prompt.tokens.shape[2]
    hidden = None
    for low in range(0, time, chunk):
        piece = slice(low, low + chunk)
        position = prompt.input_pos[:, piece]
        view.limit(max(int(position.max()) + 1, 1))
        hidden = model(
            prompt.tokens[:, :, piece].to(device),
            prompt.features,
            prompt.feature_index[:, piece].to(device),
            input_pos=position.to(device),
            cache=view,
        )
    assert hidden is not None  # a prompt has at least one column
    return Hidden(hidden.text[:, -1:], hidden.audio[:, -1:])


class _Fork:
    """A cache in which the newest position does not see the one before it: both follow the same past."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def attend_to(self, input_pos: Tensor) -> Tensor:
        mask = self.cache.attend_to(input_pos)
        mask[:, :, -1, mask.shape[3] - 2] = False
        return mask

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(layer, k, v)


@torch.inference_mode()
def prefill_fork(model: SpeechModel, cache: KVCache, prompt: Prompt, other: Tensor, chunk: int = 512) -> Hidden:
    """Prefill rows 0 and 1 with prompts that differ only in the last column; returns the last hidden states [2, 1, W].

    Row 1's last column `other` [K] is fed as one more column of row 0, then moved to its own row. Where
    the cache is too short for that column, or its window slides, the two last columns are fed as a batch of
    two instead.

    Args:
        prompt: row 0's, a batch of one; row 0 holds what comes before it.
    """
    positions, time = prompt.input_pos, prompt.tokens.shape[2]
    length = int(positions[0, -1]) + 1
    body = Prompt(prompt.tokens[:, :, :-1], positions[:, :-1], prompt.features, prompt.feature_index[:, :-1])
    pair = torch.stack([prompt.tokens[0, :, -1], other])  # [2, K]
    device = model.device
    if cache.window is not None or length + 1 > cache.length:
        if time > 1:
            prefill(model, cache, range(1), body, chunk)
        cache.copy_row(0, 1, length - 1)
        last = torch.full((2, 1), length - 1)
        return prefill(model, cache, range(2), Prompt(pair[:, :, None], last, None, torch.full((2, 1), -1)))
    done = (time - 1) // chunk * chunk  # the last piece, of at most `chunk` columns and one more, is forked
    if done:
        first = Prompt(body.tokens[:, :, :done], positions[:, :done], body.features, body.feature_index[:, :done])
        prefill(model, cache, range(1), first, chunk)
    view = cache.select(range(1)).limit(length + 1)
    tokens = torch.cat([body.tokens[:, :, done:], pair.T[None]], dim=2)
    slots = torch.cat([positions[:, done:], torch.full((1, 1), length)], dim=1)
    index = torch.cat([body.feature_index[:, done:], torch.full((1, 2), -1)], dim=1)
    hidden = model(
        tokens.to(device),
        prompt.features,
        index.to(device),
        positions=slots.clamp_max(length - 1).to(device),
        input_pos=slots.to(device),
        cache=_Fork(view),
    )
    cache.rewind(0, length)
    cache.copy_row(0, 1, length)
    cache.keys[:, 1, length - 1] = cache.keys[:, 0, length]
    cache.values[:, 1, length - 1] = cache.values[:, 0, length]
    return Hidden(hidden.text[:, -2:].transpose(0, 1), hidden.audio[:, -2:].transpose(0, 1))
