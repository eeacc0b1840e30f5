"""Prefill: writes prompts into the cache, piece by piece, and returns only the hidden state of each prompt's last column.

Prompts of different lengths are right-aligned in one batch, filled up at the front with columns at position
-1, which write nothing; so every row's last column is the batch's last. A fork serves two rows whose prompts
differ in the last column only: one sequence of T + 1 columns instead of two of T.

Dimensions: B rows, K streams, T columns, S slots, H key/value heads, D size of a head, N features, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omni.layout import Layout
from omni.model.decoder import Hidden
from omni.model.kv_cache import KVCache
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns
from omni.utils.hardware import to_device


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


class Fork(NamedTuple):
    """A second row, whose prompt differs from the first one's in its last column [K]."""

    row: int
    column: Tensor


class Prefill:
    """Writes prompts into rows of a cache.

    Args:
        rows: one for each prompt.
        fork: a second row for a batch of one; it gets a copy of the first row's columns.
    """

    def __init__(
        self, model: SpeechModel, cache: KVCache, rows: Sequence[int], prompt: Prompt, fork: Fork | None = None
    ) -> None:
        self.model, self.cache, self.rows, self.prompt, self.fork = model, cache, rows, prompt, fork
        self.fed, self.time = 0, prompt.tokens.shape[2]
        self._sent: list[Tensor] = []

    @property
    def left(self) -> int:
        """Number of columns that are still to be fed."""
        return self.time - self.fed

    @torch.inference_mode()
    def piece(self, columns: int) -> Hidden | None:
        """Feed up to that many columns (with a fork one more at the end); returns the last hidden states [B, 1, W] with the
        last piece, of the two rows where there is a fork."""
        if self.fork is None:
            hidden = self._feed(min(columns, self.left))
        elif self.left > columns:
            self._feed(columns)
            return None
        else:
            return self._split(self.fork)
        return Hidden(hidden.text[:, -1:], hidden.audio[:, -1:]) if not self.left else None

    def _feed(self, columns: int) -> Hidden:
        if not self._sent:
            self._sent = _sent(self.model.device, self.prompt.tokens, self.prompt.input_pos, self.prompt.feature_index)
        piece, (tokens, positions, index) = slice(self.fed, self.fed + columns), self._sent
        view = self.cache.select(self.rows).limit(max(int(self.prompt.input_pos[:, piece].max()) + 1, 1))
        self.fed += columns
        features = self.prompt.features
        return self.model(tokens[:, :, piece], features, index[:, piece], input_pos=positions[:, piece], cache=view)

    def _split(self, fork: Fork) -> Hidden:
        """Feed the rest; the other row's last column is one more of the first row, then moved to its own row. Where the cache
        is too short for that column, or its window slides, the two last columns are fed as a batch of two instead."""
        (row,), cache = self.rows, self.cache
        tokens, positions, features, index = self.prompt
        length = int(positions[0, -1]) + 1
        pair = torch.stack([tokens[0, :, -1], fork.column])  # [2, K]
        if cache.window is not None or length + 1 > cache.length:
            if self.left > 1:
                self._feed(self.left - 1)
            cache.copy_row(row, fork.row, length - 1)
            last = Prompt(pair[:, :, None], torch.full((2, 1), length - 1), None, torch.full((2, 1), -1))
            self.fed += 1
            return prefill(self.model, cache, (row, fork.row), last)
        rest = slice(self.fed, self.time - 1)
        slots = torch.cat([positions[:, self.fed :], torch.full((1, 1), length)], dim=1)
        tokens = torch.cat([tokens[:, :, rest], pair.T[None]], dim=2)
        index = torch.cat([index[:, rest], torch.full((1, 2), -1)], dim=1)
        tokens, slots, index, rotary = _sent(self.model.device, tokens, slots, index, slots.clamp_max(length - 1))
        view = _ForkCache(cache.select((row,)).limit(length + 1))
        hidden = self.model(tokens, features, index, positions=rotary, input_pos=slots, cache=view)
        self.fed = self.time
        cache.rewind(row, length)
        cache.copy_row(row, fork.row, length)
        for memory in (*cache.keys, *cache.values):
            memory[fork.row, length - 1] = memory[row, length]
        return Hidden(hidden.text[:, -2:].transpose(0, 1), hidden.audio[:, -2:].transpose(0, 1))


def _sent(device: torch.device, tokens: Tensor, *by_time: Tensor) -> list[Tensor]:
    """Copies tokens [B, K, T] and tensors [B, T] to the device, in one copy."""
    whole = to_device(torch.cat([tokens, *(each[:, None] for each in by_time)], dim=1), device)
    k = tokens.shape[1]
    return [whole[:, :k], *(whole[:, k + i] for i in range(len(by_time)))]


class _ForkCache:
    """A cache in which the newest position does not see the one before it: both follow the same past."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def begin_forward(self, input_pos: Tensor) -> Tensor:
        mask = self.cache.begin_forward(input_pos)
        mask[:, :, -1, mask.shape[3] - 2] = False
        return mask

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.update(layer, k, v)


def prefill(
    model: SpeechModel, cache: KVCache, rows: Sequence[int], prompt: Prompt, chunk: int = 512, fork: Fork | None = None
) -> Hidden:
    """Write prompts into rows of the cache, `chunk` columns at a time; returns the last hidden state [B, 1, W]."""
    filling = Prefill(model, cache, rows, prompt, fork)
    while (hidden := filling.piece(chunk)) is None:
        pass
    return hidden
