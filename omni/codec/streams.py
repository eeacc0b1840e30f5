"""The state of a streaming network's layers: a row of numbers per stream, in memory that grows and shrinks with them.

Rows are neighbours: the last one moves to where a stream is closed. A call of all streams, or of neighbours, works in that
memory; for others their rows are gathered and written back. A new stream's row is zeroed, whatever it held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class LayerTiming(NamedTuple):
    """Timing of a layer's inputs: positions of a frame, and the positions by which they lag."""

    rate: int
    lag: int


class RowPart(NamedTuple):
    """The numbers of a row that are one step's: `positions` by channels."""

    start: int
    stop: int
    positions: int


class StreamStep(Protocol):
    """One layer within a network."""

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        """Takes the next inputs `x` `[N, T, C]` of the call's streams; returns the outputs that became exact."""


class RowStore(Protocol):
    """State that a step holds in memory of its own, with the same rows."""

    def resize(self, rows: int, used: int) -> None:
        """Make room for `rows` streams, and keep the first `used`."""

    def clear(self, row: int) -> None:
        """Forget what a row holds."""

    def move(self, source: int, target: int) -> None:
        """Copy a row."""


class RowPlan:
    """Gathers what the steps of a network keep; `chunk` is the largest number of frames of one call."""

    def __init__(self, chunk: int = 1) -> None:
        self.chunk = chunk
        self.size = 0
        self.words: list[Callable[[int], Sequence[int]]] = []
        self.stores: list[RowStore] = []

    def keep(self, positions: int, channels: int) -> RowPart:
        """Reserves numbers of a row."""
        start = self.size
        self.size += positions * channels
        return RowPart(start, self.size, positions)

    def key(self, words: Callable[[int], Sequence[int]]) -> int:
        """Reserves the integers that `words` makes of a stream's seed, 4 of them; returns their number among all."""
        self.words.append(words)
        return len(self.words) - 1


class StreamCall:
    """One pass of some streams through a network.

    Args:
        state: rows `[N, size]` of the steps' state, which they change.
        words: rows `[N, 1 + 4 * keys]` of int64: the frames before this call, then each key.
        rows: number of each row in the stores.
        begun: the frames before this call, as the host knows them.
        frames: of this call; at the end of streams (`last`) none.
        reach: frames after which no layer has outputs before a stream's start.
    """

    def __init__(
        self, state: Tensor, words: Tensor, rows: list[int], begun: list[int], frames: int, last: bool, reach: int
    ) -> None:
        self.rows, self.frames, self.last = rows, frames, last
        self._state, self._words = state, words
        self._fresh = [row for row, count in enumerate(begun) if count == 0]
        self._young = [(row, count) for row, count in enumerate(begun) if count < reach]
        self._oldest = max(begun)
        self._reach = reach

    def positions(self, timing: LayerTiming, count: int) -> Tensor:
        """Positions `[N, count]` (int64) of a step's inputs, where `count` of them came."""
        first = self._missing(timing, count) - timing.lag
        device = self._words.device
        return self._words[:, :1] * timing.rate + torch.arange(first, first + count, device=device)

    def key(self, number: int) -> Tensor:
        """A key's words `[N, 4]` (int64)."""
        return self._words[:, 1 + 4 * number : 5 + 4 * number]

    def early(self, timing: LayerTiming, count: int) -> int:
        """How many of the first of `count` outputs are before the start of every stream; `timing` is that behind the step."""
        if self._oldest >= self._reach:
            return 0
        return self._before(timing, count, self._oldest)

    def joined(self, own: RowPart, x: Tensor, timing: LayerTiming, ahead: int = 0, replicate: bool = False) -> Tensor:
        """Joins the kept positions of `own` and the inputs x, zero before a stream's start, keeping the last ones for later.

        At the end `ahead` zeros follow.
        """
        kept = self._kept(own)
        if replicate:
            for row in self._fresh:
                kept[row] = x[row, :1]
        parts = [kept, x, x.new_zeros(x.shape[0], ahead, x.shape[2])] if self.last and ahead else [kept, x]
        joined = torch.cat(parts, dim=1)
        for row, begun in self._young:
            joined[row, own.positions : own.positions + self._before(timing, x.shape[1], begun)].zero_()
        if not self.last:
            kept.copy_(joined[:, joined.shape[1] - own.positions :])
        return joined

    def delayed(self, own: RowPart, x: Tensor) -> Tensor:
        """The inputs x delayed by the positions of `own`; at the end all that are left."""
        kept = self._kept(own)
        joined = torch.cat([kept, x], dim=1)
        if self.last:
            return joined
        kept.copy_(joined[:, x.shape[1] :])
        return joined[:, : x.shape[1]]

    def starts(self, timing: LayerTiming, count: int) -> list[int]:
        """For each stream, how many of the first of `count` outputs are before its start."""
        starts = [0] * len(self.rows)
        for row, begun in self._young:
            starts[row] = self._before(timing, count, begun)
        return starts

    def _kept(self, own: RowPart) -> Tensor:
        return self._state[:, own.start : own.stop].unflatten(1, (own.positions, -1))

    def _missing(self, timing: LayerTiming, count: int) -> int:
        """First positions of this call that were left out because all streams have them before their start."""
        return (timing.lag if self.last else self.frames * timing.rate) - count

    def _before(self, timing: LayerTiming, count: int, begun: int) -> int:
        return min(count, max(0, timing.lag - begun * timing.rate - self._missing(timing, count)))


class StreamRow:
    """A stream's row in the memory, and the frames that it has taken."""

    def __init__(self, number: int) -> None:
        self.number, self.frames = number, 0


class Streams:
    """The streams of a network of `steps` that were made with `plan`; `end` is the timing behind the last one."""

    def __init__(self, steps: Sequence[StreamStep], plan: RowPlan, end: LayerTiming, device: torch.device) -> None:
        self._steps, self._plan, self._end = steps, plan, end
        self._reach = -(-end.lag // end.rate)
        self._rows: list[StreamRow] = []
        self._state = torch.empty(0, plan.size, dtype=torch.float32, device=device)
        self._words = torch.empty(0, 1 + 4 * len(plan.words), dtype=torch.long, device=device)

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, seed: int = 0) -> StreamRow:
        """Starts a stream."""
        row = StreamRow(len(self._rows))
        if row.number == len(self._state):
            self._resize(max(1, 2 * row.number))
        self._state[row.number].zero_()
        words = [0, *(word for key in self._plan.words for word in key(seed))]
        self._words[row.number] = on_device(torch.tensor(words), self._words.device)
        for store in self._plan.stores:
            store.clear(row.number)
        self._rows.append(row)
        return row

    def close(self, row: StreamRow) -> None:
        """Ends a stream and frees its row."""
        last = self._rows.pop()
        if last is not row:
            self._rows[row.number] = last
            for memory in (self._state, self._words):
                memory[row.number] = memory[last.number]
            for store in self._plan.stores:
                store.move(last.number, row.number)
            last.number = row.number
        if 4 * len(self._rows) <= len(self._state) > 1:
            self._resize(len(self._state) // 2)

    def run(self, rows: Sequence[StreamRow], x: Tensor, frames: int, last: bool = False) -> list[Tensor]:
        """Passes the next inputs `[N, T, C]` of `frames` frames through the network, for N streams in order of their rows.

        Returns the outputs `[t, C]` of each that became exact. `last`: the streams end; x is empty then.
        """
        indices = [row.number for row in rows]
        first, count = indices[0], len(indices)
        index = None
        if indices[-1] - first + 1 == count:
            kept, words = self._state[first : first + count], self._words[first : first + count]
        else:
            index = on_device(torch.tensor(indices), self._state.device)
            kept, words = self._state[index], self._words[index]
        call = StreamCall(kept, words, indices, [row.frames for row in rows], frames, last, self._reach)
        for step in self._steps:
            x = step(x, call)
        if not last:
            words[:, 0].add_(frames)
            if index is not None:
                self._state.index_copy_(0, index, kept)
                self._words.index_copy_(0, index, words)
            for row in rows:
                row.frames += frames
        starts = call.starts(self._end, x.shape[1])
        return [own[start:] for own, start in zip(x, starts, strict=True)]

    def _resize(self, rows: int) -> None:
        used = len(self._rows)
        for name in ("_state", "_words"):
            old = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1])
            new[:used] = old[:used]
            setattr(self, name, new)
        for store in self._plan.stores:
            store.resize(rows, used)


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on `device`, without waiting for the work queued there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and x.device.type == "cpu" else x.to(device)
