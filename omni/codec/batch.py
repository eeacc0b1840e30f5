"""Decodes the frames of several streams in one call; each gets what its own stream would give.

    batch = codec.batch()
    a, b = batch.open(seed=1), batch.open(seed=2)
    batch.push([a, b], codes)       # codes [2, K, f]: a list of two sounds
    batch.finish([b])               # the rest of b, which is closed then; a goes on

A failure belongs to one stream: it is returned in the place of that stream's sound, and the stream is closed. The others of
the call get their sound. Dimensions: N streams of a call, K codebooks, f frames, S samples.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from omni.errors import UserError


class Decodes(Protocol):
    """What a batch needs of its codec; see `AudioCodec`."""

    name: str
    frame_samples: int
    device: torch.device

    def check(self, codes: Tensor, first_frame: int = 0) -> Tensor: ...

    def stream(self, seed: int = 0) -> Any: ...

    def _plain(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass
class Decoding:
    """An open stream of a batch: what its decoder keeps, and how many frames and samples it has taken and given."""

    state: Any
    pushed: int = 0
    returned: int = 0


class CodecBatch(ABC):
    """Decodes several streams together.

    Sounds are float32 `[S]` on the host, each in memory of its own: one copy brings those of a call from the codec's device.
    Codes are best on the host too, where looking at their values waits for nothing. A sound that is not finite is a failure.

    A batch belongs to one thread at a time. Numbers of streams are never used again: what comes late for a closed stream finds
    a failure, not another stream.
    """

    def __init__(self, codec: Decodes) -> None:
        self.codec = codec
        self._numbers = itertools.count()
        self._decoding: dict[int, Decoding] = {}
        self._gpu: torch.cuda.Stream | None = None
        if codec.device.type == "cuda":
            self._gpu = torch.cuda.Stream(codec.device)
            self._gpu.wait_stream(torch.cuda.current_stream(codec.device))  # where the weights were made

    def __len__(self) -> int:
        """Number of open streams."""
        return len(self._decoding)

    def open(self, seed: int = 0) -> int:
        """Starts a stream, at any time, and returns its number; `seed` keys the codec's noise, where it has some."""
        with self._beside():
            state = self._start(seed)
        number = next(self._numbers)
        self._decoding[number] = Decoding(state)
        return number

    def push(self, streams: Sequence[int], codes: Tensor) -> list[Tensor | Exception]:
        """Takes the next frames of N streams, `codes` `[N, K, f]`; returns the samples of each that became exact, maybe none.

        A failure of one stream stands in its place, and the stream is closed: codes out of range, a sound that is not finite, a
        stream that is not open. Raises UserError for a call that is wrong as a whole: another shape or type, a stream twice.
        """
        self._check_streams(streams)
        if codes.ndim != 3 or len(codes) != len(streams):
            n, name = len(streams), self.codec.name
            raise UserError(f"{n} {name} streams take codes [{n}, codebooks, frames], not {list(codes.shape)}")
        with self._beside():
            joined = _joined(codes)
            self.codec.check(joined[:, :0])  # number of codebooks, and type
            try:
                checked = self.codec.check(joined)
                results: dict[int, Tensor | Exception] = {s: self._absent(s) for s in streams if s not in self._decoding}
            except UserError:
                results = self._misfits(streams, codes)
            fit = [n for n, stream in enumerate(streams) if stream not in results]
            if fit and codes.shape[2]:
                if len(fit) < len(streams):
                    checked = self.codec.check(_joined(codes[fit]))
                checked = checked.unflatten(1, (len(fit), -1)).transpose(0, 1)
                results |= self._sounds([streams[n] for n in fit], checked)
        return [results.get(stream, _nothing()) for stream in streams]

    def finish(self, streams: Sequence[int]) -> list[Tensor | Exception]:
        """Ends streams, and returns the remaining samples of each, or its failure."""
        self._check_streams(streams)
        results: dict[int, Tensor | Exception] = {s: self._absent(s) for s in streams if s not in self._decoding}
        begun = [stream for stream in streams if stream in self._decoding and self._decoding[stream].pushed]
        if begun:
            with self._beside():
                results |= self._sounds(begun, None)
        for stream in streams:
            self.close(stream)
        return [results.get(stream, _nothing()) for stream in streams]

    def close(self, stream: int) -> None:
        """Drops a stream without its rest; does nothing where it is closed."""
        gone = self._decoding.pop(stream, None)
        if gone is not None:
            with self._beside():
                self._stop(gone.state)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Computes as the codec does; on a GPU beside what others queue there, for which nothing waits."""
        with self.codec._plain(), torch.cuda.stream(self._gpu) if self._gpu else contextlib.nullcontext():
            yield

    def _check_streams(self, streams: Sequence[int]) -> None:
        if len(set(streams)) < len(streams):
            twice = next(stream for n, stream in enumerate(streams) if stream in streams[:n])
            raise UserError(f"stream {twice} comes twice in one call: give its frames together")

    def _absent(self, stream: int) -> UserError:
        return UserError(f"{self.codec.name} stream {stream} is not open (finished, closed, or failed): open a new one")

    def _misfits(self, streams: Sequence[int], codes: Tensor) -> dict[int, Tensor | Exception]:
        """Failures of streams that are not open or whose codes do not fit; these are closed."""
        failed: dict[int, Tensor | Exception] = {s: self._absent(s) for s in streams if s not in self._decoding}
        for stream, own in zip(streams, codes, strict=True):
            if stream not in failed:
                try:
                    self.codec.check(own, self._decoding[stream].pushed)
                except UserError as error:
                    failed[stream] = error
                    self.close(stream)
        return failed

    def _sounds(self, streams: Sequence[int], codes: Tensor | None) -> dict[int, Tensor | Exception]:
        """Decodes checked `codes` `[N, K, f]`, or the ends of streams, and counts; failed streams are closed."""
        decoding = [self._decoding[stream] for stream in streams]
        states = [one.state for one in decoding]
        try:
            sounds = _on_host(self._push(states, codes) if codes is not None else self._finish(states))
        except Exception as error:  # a failure of all together: nobody knows what was computed of whom
            sounds = [error] * len(states)
        results: dict[int, Tensor | Exception] = {}
        finite = _all_finite(sounds)
        for stream, one, sound in zip(streams, decoding, sounds, strict=True):
            if isinstance(sound, Tensor):
                one.pushed += 0 if codes is None else codes.shape[2]
                one.returned += sound.shape[0]
                sound = self._judged(one, sound, finite, ended=codes is None)
            if isinstance(sound, Exception):
                self.close(stream)
            results[stream] = sound
        return results

    def _judged(self, one: Decoding, sound: Tensor, finite: bool, ended: bool) -> Tensor | Exception:
        """The sound, or what is wrong with it."""
        name, whole = self.codec.name, one.pushed * self.codec.frame_samples
        if not finite and not _all_finite([sound]):
            return UserError(f"{name} made a sound that is not finite by frame {one.pushed - 1}: its weights are damaged")
        if ended and one.returned != whole:
            return UserError(f"{name} made {one.returned} samples of {one.pushed} frames; its frame_samples asks for {whole}")
        return sound

    @abstractmethod
    def _start(self, seed: int) -> Any:
        """What is kept of a new stream: its state."""

    @abstractmethod
    def _push(self, states: Sequence[Any], codes: Tensor) -> list[Tensor | Exception]:
        """Sounds, on any device, of checked codes `[N, K, f]` on the codec's device, or the failures; f > 0."""

    @abstractmethod
    def _finish(self, states: Sequence[Any]) -> list[Tensor | Exception]:
        """The rests of streams that have taken at least one frame each; `_stop` follows."""

    @abstractmethod
    def _stop(self, state: Any) -> None:
        """Frees the state of a stream, finished or not."""


class StreamsInTurn(CodecBatch):
    """The batch of a codec that has no other: its streams one after another."""

    def _start(self, seed: int) -> Any:
        return self.codec.stream(seed)

    def _push(self, states: Sequence[Any], codes: Tensor) -> list[Tensor | Exception]:
        return [_attempt(stream.push, own) for stream, own in zip(states, codes, strict=True)]

    def _finish(self, states: Sequence[Any]) -> list[Tensor | Exception]:
        return [_attempt(stream.finish) for stream in states]

    def _stop(self, state: Any) -> None:
        pass  # a stream frees what it keeps when it is dropped


def _attempt(function: Callable[..., Tensor], *arguments: Tensor) -> Tensor | Exception:
    try:
        return function(*arguments)
    except Exception as error:
        return error


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.float32)


def _joined(codes: Tensor) -> Tensor:
    """Codes `[K, N * f]` of codes `[N, K, f]`, one stream after another."""
    return codes.transpose(0, 1).flatten(1)


def _all_finite(sounds: Sequence[Tensor | Exception]) -> bool:
    there = [sound for sound in sounds if isinstance(sound, Tensor)]
    return not there or bool(torch.cat(there).isfinite().all())


def _on_host(sounds: list[Tensor | Exception]) -> list[Tensor | Exception]:
    """The sounds on the host, by one copy."""
    there = [sound for sound in sounds if isinstance(sound, Tensor)]
    if not there or all(sound.device.type == "cpu" for sound in there):
        return sounds
    here = iter(torch.cat(there).cpu().split([len(sound) for sound in there]))
    return [next(here).clone() if isinstance(sound, Tensor) else sound for sound in sounds]
