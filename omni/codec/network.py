"""Codecs whose decoder is a network of streaming layers (`omni/codec/streaming.py`): the state of the layers, and the codecs'
streams, batches and whole decodes.

The state is a row of numbers per stream, in memory that grows and shrinks with them. Rows are neighbours: the last one moves to
where a stream is closed. A call of all streams, or of neighbours, works in that memory; for others their rows are gathered and
written back. A new stream's row is zeroed, whatever it held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecBatch, CodecStream
from omni.utils.hardware import to_device

if TYPE_CHECKING:
    from omni.model.kv_cache import KVCache


class LayerTiming(NamedTuple):
    """Timing of a layer's inputs: positions of a frame, and the positions by which they lag."""

    rate: int
    lag: int


class RowPart(NamedTuple):
    """The numbers of a row that are one layer's: `positions` by channels."""

    start: int
    stop: int
    positions: int


class Layer(ABC):
    """One layer, with its weights, which streams once it has its place in a network."""

    def place(self, timing: LayerTiming, network: Network) -> LayerTiming:
        """Takes its place, where inputs have `timing`, and reserves what it keeps; returns the timing of its outputs."""
        return timing

    @abstractmethod
    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        """Takes the next inputs `x` `[N, T, C]` of the call's streams; returns the outputs that became exact."""


class Network:
    """Layers that follow each other, the first with `rate` inputs a frame, and what a stream's row holds for them.

    Attributes:
        end: timing behind the last layer.
        size: numbers of a row.
        words: for each key the function of a stream's seed that makes its 4 integers.
        caches: functions that make the cache of a layer that attends, of a number of rows and of frames of one call.
    """

    def __init__(self, layers: Sequence[Layer], rate: int) -> None:
        self.layers, self.size = layers, 0
        self.words: list[Callable[[int], Sequence[int]]] = []
        self.caches: list[Callable[[int, int], KVCache]] = []
        self.end = self.place(layers, LayerTiming(rate, 0))

    def place(self, layers: Sequence[Layer], timing: LayerTiming) -> LayerTiming:
        """Gives layers that follow each other their places; returns the timing behind the last."""
        for layer in layers:
            timing = layer.place(timing, self)
        return timing

    def keep(self, positions: int, channels: int) -> RowPart:
        """Reserves numbers of a row."""
        start = self.size
        self.size += positions * channels
        return RowPart(start, self.size, positions)


class StreamCall:
    """One pass of streams through a network.

    Args:
        streams: all streams of the network.
        rows: the streams of this call.
        state: rows `[N, size]` of the layers' state, which they change.
        words: rows `[N, 1 + 4 * keys]` of int64: the frames before this call, then each key.
        frames: of this call; at the end of streams (`last`) none.
    """

    def __init__(
        self, streams: Streams, rows: Sequence[StreamRow], state: Tensor, words: Tensor, frames: int, last: bool
    ) -> None:
        self.frames, self.last = frames, last
        self._streams, self._rows, self._state, self.words = streams, rows, state, words
        self._fresh = [n for n, row in enumerate(rows) if row.pushed == 0]
        self._young = [(n, row.pushed) for n, row in enumerate(rows) if row.pushed < streams.reach]
        self._oldest = max(row.pushed for row in rows)

    def cache(self, number: int) -> KVCache:
        """The rows of this call in a cache."""
        cache = self._streams.caches[number]
        return cache if len(self._rows) == cache.rows else cache.select([row.number for row in self._rows])

    def positions(self, timing: LayerTiming, count: int) -> Tensor:
        """Positions `[N, count]` (int64) of a layer's inputs, where `count` of them came."""
        end = 0 if self.last else self.frames * timing.rate - timing.lag  # after the first ones were left out, if they were
        return self.words[:, :1] * timing.rate + torch.arange(end - count, end, device=self.words.device)

    def early(self, timing: LayerTiming, count: int) -> int:
        """How many of the first of `count` outputs are before the start of every stream; `timing` is that behind the layer."""
        if self._oldest >= self._streams.reach:
            return 0
        return self._before(timing, count, self._oldest)

    def joined(self, own: RowPart, x: Tensor, timing: LayerTiming, ahead: int = 0, replicate: bool = False) -> Tensor:
        """Joins the kept positions of `own` and the inputs x, zero before a stream's start, keeping the last ones for later.

        At the end `ahead` zeros follow.
        """
        kept = self._state[:, own.start : own.stop].unflatten(1, (own.positions, -1))
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

    def starts(self, timing: LayerTiming, count: int) -> list[int]:
        """For each stream, how many of the first of `count` outputs are before its start."""
        starts = [0] * len(self._rows)
        for row, begun in self._young:
            starts[row] = self._before(timing, count, begun)
        return starts

    def _before(self, timing: LayerTiming, count: int, begun: int) -> int:
        # First positions of this call that were left out because all streams have them before their start.
        missing = (timing.lag if self.last else self.frames * timing.rate) - count
        return min(count, max(0, timing.lag - begun * timing.rate - missing))


@dataclass(eq=False)
class StreamRow:
    """A stream's row in the memory, and the frames that it has taken."""

    number: int
    pushed: int = 0


class Streams:
    """The streams of a network; `chunk` is the largest number of frames of one call.

    Attributes:
        reach: frames after which no layer has outputs before a stream's start.
        caches: of the layers that attend, with a row for each stream.
    """

    def __init__(self, network: Network, device: torch.device, chunk: int = 1) -> None:
        self._network, self._chunk = network, chunk
        self.reach = -(-network.end.lag // network.end.rate)
        self._rows: list[StreamRow] = []
        self._state = torch.empty(0, network.size, dtype=torch.float32, device=device)
        self._words = torch.empty(0, 1 + 4 * len(network.words), dtype=torch.long, device=device)
        self.caches = [make(0, chunk) for make in network.caches]

    def open(self, seed: int = 0) -> StreamRow:
        """Starts a stream."""
        row = StreamRow(len(self._rows))
        if row.number == len(self._state):
            self._resize(max(1, 2 * row.number))
        self._state[row.number].zero_()
        words = [0, *(word for key in self._network.words for word in key(seed))]
        self._words[row.number] = to_device(torch.tensor(words), self._words.device)
        for cache in self.caches:
            cache.reset([row.number])
        self._rows.append(row)
        return row

    def close(self, row: StreamRow) -> None:
        """Ends a stream and frees its row."""
        last = self._rows.pop()
        if last is not row:
            self._rows[row.number] = last
            for memory in (self._state, self._words):
                memory[row.number] = memory[last.number]
            for cache in self.caches:
                cache.copy_row(last.number, row.number)
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
            index = to_device(torch.tensor(indices), self._state.device)
            kept, words = self._state[index], self._words[index]
        call = StreamCall(self, rows, kept, words, frames, last)
        for layer in self._network.layers:
            x = layer(x, call)
        if not last:
            words[:, 0].add_(frames)
            if index is not None:
                self._state.index_copy_(0, index, kept)
                self._words.index_copy_(0, index, words)
            for row in rows:
                row.pushed += frames
        starts = call.starts(self._network.end, x.shape[1])
        return [own[start:] for own, start in zip(x, starts, strict=True)]

    def _resize(self, rows: int) -> None:
        used, state, words, caches = len(self._rows), self._state, self._words, self.caches
        self._state, self._words = (old.new_zeros(rows, old.shape[1]) for old in (state, words))
        self._state[:used], self._words[:used] = state[:used], words[:used]
        self.caches = [make(rows, self._chunk) for make in self._network.caches]
        for cache, old in zip(self.caches, caches, strict=True):
            cache.take(old, used)


# --- codecs ------------------------------------------------------------------------------------------------------------


WHOLE = 32
"""Frames that a whole decode takes at once where no CPU computes."""


class NetworkCodec(AudioCodec):
    """A codec that turns codes to latents, and these to sound by layers that stream.

    On a CPU frames pass one at a time, so that whole and streamed decodes are the same bits; other devices take many frames of
    a whole decode at once, and its sound is that of the stream to 1e-5.
    """

    takes_threads = True
    _decoder: Network
    _together = 8
    """Streams that pass through the layers together on a CPU: more do not fit its caches."""

    def exact_samples(self, frames: int) -> int:
        rate, lag = self._decoder.end
        return max(0, frames * rate - lag)

    def decode(self, codes: Tensor, seed: int = 0) -> Tensor:
        stream = NetworkStream(self, seed, 1 if self.device.type == "cpu" else WHOLE)
        return torch.cat([stream.push(codes), stream.finish()])

    def stream(self, seed: int = 0) -> CodecStream:
        return NetworkStream(self, seed)

    def batch(self) -> CodecBatch:
        return NetworkBatch(self)

    def _pass(self, streams: Streams, rows: Sequence[StreamRow], codes: Tensor | None) -> list[Tensor]:
        """Sounds `[S]` of the next frames `[N, K, f]`, all at once; None: what is left at the end."""
        if last := codes is None:
            if self._decoder.end.lag == 0:
                return [torch.empty(0, dtype=torch.float32, device=self.device)] * len(rows)
            codes = torch.empty(len(rows), len(self.codebook_sizes), 0, dtype=torch.long, device=self.device)
        return [sound[:, 0] for sound in streams.run(rows, self.latents(codes), codes.shape[2], last)]

    @abstractmethod
    def latents(self, codes: Tensor) -> Tensor:
        """The decoder's input `[N, T, C]` of checked codes `[N, K, F]`."""


class NetworkStream(CodecStream):
    """One stream, alone in its memory, of which up to `chunk` frames pass at once.

    On CPUs it is one: in other sizes the same kernels round differently, and are no faster.
    """

    codec: NetworkCodec

    def __init__(self, codec: NetworkCodec, seed: int, chunk: int = 1) -> None:
        super().__init__(codec)
        with codec._plain():
            self._streams, self._chunk = Streams(codec._decoder, codec.device, chunk), chunk
            self._rows = [self._streams.open(seed)]

    def _push(self, codes: Tensor) -> Tensor:
        parts = codes[None].split(self._chunk, dim=2)
        return torch.cat([self.codec._pass(self._streams, self._rows, part)[0] for part in parts])

    def _finish(self) -> Tensor:
        rest = self.codec._pass(self._streams, self._rows, None)[0]
        del self._streams
        return rest


class NetworkBatch(CodecBatch):
    """Streams that pass through the layers together."""

    codec: NetworkCodec

    def __init__(self, codec: NetworkCodec) -> None:
        super().__init__(codec)
        with codec._plain():
            self._streams = Streams(codec._decoder, codec.device)

    def _start(self, seed: int) -> StreamRow:
        return self._streams.open(seed)

    def _decode(self, states: Sequence[StreamRow], codes: Tensor | None) -> list[Tensor | Exception]:
        parts: list[list[Tensor]] = [[] for _ in states]
        order = sorted(range(len(states)), key=lambda n: states[n].number)
        size = self.codec._together if self.codec.device.type == "cpu" else len(order)
        for group in (order[first : first + size] for first in range(0, len(order), size)):
            rows, frames = [states[n] for n in group], [None]
            if codes is not None:
                chosen = codes if group == list(range(len(states))) else codes[to_device(torch.tensor(group), codes.device)]
                frames = chosen.split(1, dim=2)
            for frame in frames:
                for n, sound in zip(group, self.codec._pass(self._streams, rows, frame), strict=True):
                    parts[n].append(sound)
        return [torch.cat(sounds) for sounds in parts]

    def _stop(self, state: StreamRow) -> None:
        self._streams.close(state)
