"""Codecs whose decoder is a network of streaming layers: their streams, their batches, and whole decodes."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecBatch, CodecStream
from omni.codec.streams import Network, StreamRow, Streams
from omni.errors import UserError
from omni.files import refuse_pointer
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
        if self.device.type == "cpu":
            return super().decode(codes, seed)
        return self._whole(codes, seed, WHOLE)

    def stream(self, seed: int = 0) -> CodecStream:
        return NetworkStream(self, seed)

    def batch(self) -> CodecBatch:
        return NetworkBatch(self)

    def streams(self, chunk: int = 1) -> Streams:
        """No streams yet; `chunk` is the largest number of frames of one call."""
        return Streams(self._decoder, self.device, chunk)

    def _whole(self, codes: Tensor, seed: int, chunk: int) -> Tensor:
        codes = self.check(codes)
        if codes.shape[1] == 0:
            return torch.empty(0, dtype=torch.float32, device=self.device)
        with self._plain():
            streams = self.streams(chunk)
            rows = [streams.open(seed)]
            parts = [self._pass(streams, rows, piece[None])[0] for piece in codes.split(chunk, dim=1)]
            return torch.cat([*parts, self._end(streams, rows)[0]])

    def _pass(self, streams: Streams, rows: Sequence[StreamRow], codes: Tensor) -> list[Tensor]:
        """Sounds `[S]` of the next frames `[N, K, f]`, all at once."""
        sounds = streams.run(rows, self.latents(codes), codes.shape[2])
        return [sound[:, 0] for sound in sounds]

    def _end(self, streams: Streams, rows: Sequence[StreamRow]) -> list[Tensor]:
        """Sounds `[S]` that are left at the end."""
        if self._decoder.end.lag == 0:
            return [torch.empty(0, dtype=torch.float32, device=self.device)] * len(rows)
        empty = torch.empty(len(rows), len(self.codebook_sizes), 0, dtype=torch.long, device=self.device)
        return [sound[:, 0] for sound in streams.run(rows, self.latents(empty), 0, last=True)]

    @abstractmethod
    def latents(self, codes: Tensor) -> Tensor:
        """The decoder's input `[N, T, C]` of checked codes `[N, K, F]`."""


class NetworkStream(CodecStream):
    """One stream, alone in its memory."""

    codec: NetworkCodec

    def __init__(self, codec: NetworkCodec, seed: int) -> None:
        super().__init__(codec)
        with codec._plain():
            self._streams = codec.streams()
            self._rows = [self._streams.open(seed)]

    def _push(self, codes: Tensor) -> Tensor:
        # Frame by frame: in other sizes the same kernels round differently, and on CPUs they are no faster.
        return torch.cat([self.codec._pass(self._streams, self._rows, frame[None])[0] for frame in codes.split(1, dim=1)])

    def _finish(self) -> Tensor:
        rest = self.codec._end(self._streams, self._rows)[0]
        del self._streams
        return rest


class NetworkBatch(CodecBatch):
    """Streams that pass through the layers together."""

    codec: NetworkCodec

    def __init__(self, codec: NetworkCodec) -> None:
        super().__init__(codec)
        with codec._plain():
            self._streams = codec.streams()

    def _start(self, seed: int) -> StreamRow:
        return self._streams.open(seed)

    def _push(self, states: Sequence[StreamRow], codes: Tensor) -> list[Tensor | Exception]:
        parts: list[list[Tensor]] = [[] for _ in states]
        for group in self._groups(states):
            chosen = codes if group == list(range(len(states))) else codes[to_device(torch.tensor(group), codes.device)]
            rows = [states[n] for n in group]
            for frame in chosen.split(1, dim=2):
                for n, sound in zip(group, self.codec._pass(self._streams, rows, frame), strict=True):
                    parts[n].append(sound)
        return [torch.cat(sounds) for sounds in parts]

    def _finish(self, states: Sequence[StreamRow]) -> list[Tensor | Exception]:
        rests: list[Tensor | Exception] = [torch.empty(0)] * len(states)
        for group in self._groups(states):
            for n, sound in zip(group, self.codec._end(self._streams, [states[n] for n in group]), strict=True):
                rests[n] = sound.clone()
        return rests

    def _stop(self, state: StreamRow) -> None:
        self._streams.close(state)

    def _groups(self, states: Sequence[StreamRow]) -> Iterator[list[int]]:
        """Streams of a call in order of their rows, as many at a time as pass together."""
        order = sorted(range(len(states)), key=lambda n: states[n].number)
        size = self.codec._together if self.codec.device.type == "cpu" else len(order)
        for first in range(0, len(order), size):
            yield order[first : first + size]


def read_settings(path: Path) -> dict[str, Any]:
    """The `config.json` of a codec's folder; UserError where it is missing, or no JSON object."""
    if not path.is_file():
        raise UserError(f"{path} is missing: give the codec's folder, with its config.json and its weights")
    refuse_pointer(path)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no JSON object: fetch it again")
    return settings
