"""Codecs whose decoder is a network of streaming layers: their streams, their batches, and whole decodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecBatch, CodecStream
from omni.codec.streams import Network, StreamRow, Streams
from omni.utils.hardware import to_device

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
