"""The key/value cache: passed into the model, never held by it.

Two classes share one small interface, `begin_forward(input_pos)` once per forward and `update(layer, k, v)` in every layer:

- `KVCache` is preallocated and written in place; it refuses to be written while autograd records.
- `FunctionalKVCache` concatenates; gradients flow through it.

Both are plain classes: Fabric moves and casts tensors it finds in a forward's arguments, which would lose writes; a plain
object passes untouched, and `state_dict` never sees it.

Dimensions: B batch, T time of this call, S slots of a row, H key/value heads, D size of a head, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from omni.cpu import compiled
from omni.errors import UserError
from omni.utils.hardware import to_device
from omni.utils.private import foreach_zero_


class Cache(Protocol):
    """Interface of a cache, as the decoder uses it."""

    def begin_forward(self, input_pos: Tensor) -> Tensor:
        """Start a forward at `input_pos` [B, T]; returns the mask [B, 1, T, S] of the slots that each position may see."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v [B, H, T, D] of one layer; returns all its keys and values [B, H, S, D], in the order of the mask."""


class _Layer(NamedTuple):
    """Views of one layer's memory: all slots of all rows [B * (S + 1), H, D], and the slots that are read [B, H, S, D]."""

    key_slots: Tensor
    value_slots: Tensor
    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of every layer at fixed addresses, one row per sequence.

    `keys` and `values` are lists of one tensor [B, S + 1, H, D] per layer. As parts of one tensor they would not be written in
    place by a compiled step: Inductor clones every layer of such a tensor and writes the clones back (torch 2.14).

    A position of -1 in `input_pos` marks padding or an inactive row: it is written to a spare slot that no mask shows.
    With a sliding window the slots form a ring of `window + chunk - 1`, where `chunk` is the longest piece fed at once.

    A mask alone does not hide NaN (0 * NaN is NaN). So a slot that was forgotten is zeroed before it is read again, whatever it
    holds by then: `_clean` counts, on the host, the first slots of each row that were written or zeroed since.

    `writes` are the slots that the present forward writes, [B * T], among all [B, S + 1] of `keys`; `begin_forward` sets them.

    Args:
        layers, rows, heads, head_dim: shape of the cache (`heads` are key/value heads).
        length: positions a row can hold; with a window the positions are unbounded.
        window: sliding window of the attention, None for all.
        chunk: longest piece that is fed at once (matters with a window only).
    """

    writes: Tensor

    def __init__(
        self,
        layers: int,
        rows: int,
        length: int,
        heads: int,
        head_dim: int,
        *,
        window: int | None = None,
        chunk: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.window = window
        self.chunk = chunk
        self.ring = window is not None and window + chunk - 1 < length
        self.slots = window + chunk - 1 if self.ring and window is not None else length
        self.length = length
        self.dtype = dtype
        shape = (rows, self.slots + 1, heads, head_dim)
        self.keys, self.values = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in "kv")
        self.positions = torch.full((rows, self.slots + 1), -1, dtype=torch.long, device=device)
        self._memory = (*self.keys, *self.values)  # of all rows, in views too
        self._clean = [self.slots] * rows
        self._indices: Sequence[int] = range(rows)  # the rows of this view among all
        self._visible = self.slots
        self._rows: Tensor | None = None
        self._layers: list[_Layer] = []

    @property
    def rows(self) -> int:
        return len(self.positions) if self._rows is None else len(self._rows)

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def select(self, rows: Sequence[int]) -> KVCache:
        """A view of some rows that shares this cache's memory: row i of a batch is row `rows[i]` of the cache.

        Neighbouring rows are read in place; others are gathered in every layer.
        """
        view = object.__new__(KVCache)
        view.__dict__.update(self.__dict__)
        first, count = rows[0], len(rows)
        view._indices = [self._indices[row] for row in rows]
        if self._rows is None and list(rows) == list(range(first, first + count)):
            view.keys = [keys[first : first + count] for keys in self.keys]
            view.values = [values[first : first + count] for values in self.values]
            view.positions = self.positions[first : first + count]
        else:
            index = to_device(torch.tensor(list(rows)), self.device)
            view._rows = index if self._rows is None else self._rows[index]
        view._layers = []
        return view

    def limit(self, positions: int | None) -> KVCache:
        """Read only the first `positions` slots: the caller knows that nothing is kept beyond (saves work; not for a ring)."""
        visible = self.slots if positions is None or self.ring else min(positions, self.slots)
        if visible != self._visible:
            self._visible, self._layers = visible, []
        return self

    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empty the rows (all by default)."""
        for row in range(self.rows) if rows is None else rows:
            self.positions[row].fill_(-1)
            self._clean[self._indices[row]] = 0

    def rewind(self, row: int, length: int) -> None:
        """Keep positions below `length` of one row and forget the rest."""
        held = self.positions[row]
        if self.ring:
            for memory in (*self.keys, *self.values):
                memory[row].masked_fill_((held >= length)[:, None, None], 0)
        else:
            number = self._indices[row]
            self._clean[number] = min(self._clean[number], length)
        held.masked_fill_(held >= length, -1)

    def copy_row(self, source: int, target: int, length: int | None = None) -> None:
        """Make row `target` equal to row `source`, or to its first `length` positions where no more is held (saves work)."""
        used = slice(None) if length is None or self.ring else slice(0, length)
        for memory in (*self.keys, *self.values):
            memory[target, used] = memory[source, used]
        self.positions[target] = self.positions[source]
        clean = self._clean[self._indices[source]]
        self._clean[self._indices[target]] = clean if used.stop is None else min(clean, used.stop)

    @torch.no_grad()
    def exchange_rows(self, first: int, second: int, length: int | None = None) -> None:
        """Exchange two rows, or their first `length` positions where neither holds more (saves work)."""
        used = slice(None) if length is None or self.ring else slice(0, length)
        for memory in (*self.keys, *self.values, self.positions):
            part = slice(None) if memory is self.positions else used
            kept = memory[first, part].clone()
            memory[first, part] = memory[second, part]
            memory[second, part] = kept
        indices, most = (self._indices[first], self._indices[second]), self.slots if used.stop is None else used.stop
        before = [min(self._clean[index], most) for index in indices]
        self._clean[indices[0]], self._clean[indices[1]] = before[1], before[0]

    def take(self, other: KVCache, rows: int) -> None:
        """Copy the first rows of another cache of the same window and chunk, and no more slots, to those of this one, which are
        empty."""
        used = slice(0, other.slots if other.ring else max(other._clean, default=0))
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[:rows, used] = theirs[:rows, used]
        self.positions[:rows, : other.slots] = other.positions[:rows, : other.slots]
        self._clean[:rows] = other._clean[:rows]

    def clean(self, positions: int | None = None) -> None:
        """Zero the forgotten slots of these rows among those that are read (or among the first `positions`, where given).

        `begin_forward` does it too; a step that runs compiled or as a captured graph needs it done before.
        """
        high = self._visible if positions is None or self.ring else min(positions, self.slots)
        for number in self._indices:
            low = self._clean[number]
            if low < high:
                foreach_zero_([memory[number, low:high] for memory in self._memory])  # few kernels on a GPU
                self._clean[number] = high

    def begin_forward(self, input_pos: Tensor) -> Tensor:
        if input_pos.ndim != 2 or input_pos.shape[0] != self.rows:
            raise UserError(f"input_pos has shape {tuple(input_pos.shape)}; a cache of {self.rows} rows needs [{self.rows}, T]")
        width = input_pos.shape[1]
        if self.ring and width > self.chunk:
            raise UserError(f"a piece of {width} positions was fed to a sliding cache made for {self.chunk}; raise chunk")
        free = input_pos.device.type == "cpu" and not torch.compiler.is_compiling()  # reading values does not synchronise
        if free and not self.ring and int(input_pos.max()) >= self.slots:
            raise UserError(f"position {int(input_pos.max())} does not fit a cache of length {self.slots}; make it longer")
        if not torch.compiler.is_compiling():
            self.clean()
        slot = input_pos % self.slots if self.ring else input_pos
        slot = torch.where(input_pos >= 0, slot, self.slots)
        rows = torch.arange(self.rows, device=input_pos.device) if self._rows is None else self._rows
        self.writes = (rows[:, None] * (self.slots + 1) + slot).flatten()
        self.positions.view(-1).index_copy_(0, self.writes, input_pos.flatten())  # the spare slot gets a position below 0
        held = self.positions if self._rows is None else self.positions[self._rows]
        held = held[:, None, None, : self._visible]
        now = input_pos[:, None, :, None]
        mask = (held >= 0) & (held <= now)
        if self.window is not None:
            mask = mask & (held > now - self.window)
        return mask | (now < 0)  # padding attends to everything: its result is not used, but must not become NaN

    def write_slots_and_mask(self, input_pos: Tensor) -> Tensor:
        """`begin_forward` of one column [B, 1] on a CPU, compiled, with a mask [B, 1, 1, S] that is added to the scores: 0, or
        minus infinity. Few of PyTorch's operations are used: in each the thread gives up the interpreter's lock."""
        rows = np.arange(self.rows) if self._rows is None else self._rows.numpy()
        now = np.ascontiguousarray(input_pos.numpy()[:, 0])
        if len(now) != len(rows) or (not self.ring and now.max() >= self.slots):
            self.begin_forward(input_pos)  # which says what is wrong
        self.clean()
        mask, writes = np.empty((len(now), self._visible), np.float32), np.empty(len(now), np.int64)
        compiled.place(now, rows, self.positions.numpy(), self.ring, self.window or 0, writes, mask)
        self.writes = torch.from_numpy(writes)
        return torch.from_numpy(mask[:, None, None])

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError(
                "KVCache would be written in place while autograd records: to generate, run under torch.no_grad(); to "
                "train, leave input_pos and cache None, or pass a FunctionalKVCache to train through a cache"
            )
        dtype, wanted = self.dtype, k.dtype
        if wanted != dtype:
            k, v = k.to(dtype), v.to(dtype)
        here = self._layer(layer)
        here.key_slots.index_copy_(0, self.writes, k.transpose(1, 2).flatten(0, 1))
        here.value_slots.index_copy_(0, self.writes, v.transpose(1, 2).flatten(0, 1))
        keys, values = here.keys, here.values
        if self._rows is not None:
            keys, values = keys[self._rows], values[self._rows]
        return (keys, values) if wanted == dtype else (keys.to(wanted), values.to(wanted))

    def _layer(self, layer: int) -> _Layer:
        """The views of one layer; made once, because making them would take a noticeable part of a step."""
        if torch.compiler.is_compiling():
            return self._view(layer)
        if not self._layers:
            with torch.inference_mode(False):
                self._layers = [self._view(i) for i in range(len(self.keys))]
        return self._layers[layer]

    def _view(self, layer: int) -> _Layer:
        keys, values = self.keys[layer], self.values[layer]
        seen = slice(None, self._visible)
        return _Layer(keys.flatten(0, 1), values.flatten(0, 1), keys[:, seen].transpose(1, 2), values[:, seen].transpose(1, 2))


class FunctionalKVCache:
    """A cache that is never changed in place: each forward returns longer tensors, and gradients flow through them."""

    def __init__(self, layers: int, *, window: int | None = None) -> None:
        self.window = window
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.positions: Tensor | None = None

    def begin_forward(self, input_pos: Tensor) -> Tensor:
        old = self.positions
        held = input_pos if old is None else torch.cat([old, input_pos], dim=1)
        self.positions = held
        now = input_pos[:, None, :, None]
        seen = held[:, None, None, :]
        mask = (seen >= 0) & (seen <= now)
        if self.window is not None:
            mask = mask & (seen > now - self.window)
        return mask

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        if keys is not None and values is not None:
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v
