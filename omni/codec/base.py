"""The contract of an audio codec: frames of K parallel codes in, sound out, whole or as a stream.

Dimensions: N streams of a call, K codebooks (the model's audio streams), F or f frames, S samples. The model sees `[K, F]`
codes and never asks which codec they belong to. Code that turns codes into sound opens a `stream()`, pushes frames as they are
produced, and gets exactly the samples that `decode` of all frames would give, as early as they can be known.

A batch decodes the frames of several streams in one call; each gets what its own stream would give:

    batch = codec.batch()
    a, b = batch.open(seed=1), batch.open(seed=2)
    batch.push([a, b], codes)       # codes [2, K, f]: a list of two sounds
    batch.finish([b])               # the rest of b, which is closed then; a goes on

A failure belongs to one stream: it is returned in the place of that stream's sound, and the stream is closed. The others of the
call get their sound.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError
from omni.plugins import named
from omni.utils.hardware import to_device

_CONVOLUTIONS: Any = getattr(torch.backends.cudnn, "conv")  # noqa: B009 PyTorch does not type it


_lock = threading.Lock()
_before: list[str] = []  # for each thread inside of `_exact_convolutions`, the precision before the first came


@contextlib.contextmanager
def _exact_convolutions() -> Iterator[None]:
    """A context in which cuDNN's convolutions do not round their inputs to TF32, as they do by default.

    PyTorch has one flag for the process: the first of several threads turns it off, and the last one puts it back.
    """
    with _lock:
        _before.append(_before[0] if _before else _CONVOLUTIONS.fp32_precision)
        _CONVOLUTIONS.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _lock:
            precision = _before.pop()
            if not _before:
                _CONVOLUTIONS.fp32_precision = precision


@functools.cache
def _column(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(sizes, device=device)[:, None]


class AudioCodec(ABC):
    """Interface of every codec. Constants are set by the subclass, per class or per instance.

    Attributes:
        name: its name in the registry and in checkpoints.
        sample_rate: of the sound it reads and writes, in Hz.
        frame_samples: samples of one frame.
        codebook_sizes: number of codes of each of the K streams, in the model's stream order.
        lookahead: how many frames must follow a frame before all of its samples are exact (0: none).
        deterministic: whether the same codes and seed always give the same sound.
        device: where the codec computes and its results lie; inputs are moved there.
        takes_threads: whether it computes with PyTorch's CPU threads, as a network does.
        portable: whether its name alone makes another process decode the same; it has no weights, and no lookahead.
    """

    name: str
    sample_rate: int
    frame_samples: int
    codebook_sizes: tuple[int, ...]
    lookahead: int = 0
    deterministic: bool = True
    device: torch.device = torch.device("cpu")
    takes_threads: bool = False
    portable: bool = False

    @property
    def frame_rate(self) -> float:
        """Frames per second."""
        return self.sample_rate / self.frame_samples

    def frames(self, samples: int) -> int:
        """Frames that `encode` makes of `samples` samples: the last one is filled up with silence."""
        return -(-samples // self.frame_samples)

    def exact_samples(self, frames: int) -> int:
        """Samples that a stream has returned in all after `frames` frames, before its finish."""
        return frames * self.frame_samples

    def encode(self, audio: Tensor, sample_rate: int | None = None) -> Tensor:
        """Codes `[K, F]` (int64) of mono sound `[S]` (floating point, nominally in [-1, 1]).

        `sample_rate` is the rate of `audio` in Hz, and must be the codec's own; None means that it is. Raises
        UserError for another rate, another shape or type, or samples that are not finite.
        """
        if sample_rate is not None and sample_rate != self.sample_rate:
            raise UserError(f"{self.name} encodes {self.sample_rate} Hz, not {sample_rate} Hz: resample the audio first")
        if audio.ndim != 1 or not audio.is_floating_point():
            raise UserError(
                f"{self.name} encodes mono floating-point audio [samples], not {audio.dtype} "
                f"{list(audio.shape)}: mix the channels and scale to [-1, 1] first"
            )
        finite = torch.isfinite(audio)
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            raise UserError(f"audio for {self.name}: sample {first} is {float(audio[first])}; fix or drop the recording")
        if audio.numel() == 0:
            return torch.empty(len(self.codebook_sizes), 0, dtype=torch.long, device=self.device)
        with self._plain(), named(f"codec {self.name}"):
            codes = self._encode(audio.to(self.device, torch.float32))
        wanted = [len(self.codebook_sizes), self.frames(audio.numel())]
        shape = list(getattr(codes, "shape", [type(codes).__name__]))
        if shape != wanted:
            raise UserError(f"{self.name} made codes {shape} of {audio.numel()} samples; its sizes ask for {wanted}")
        return codes

    def decode(self, codes: Tensor, seed: int = 0) -> Tensor:
        """Sound `[F * frame_samples]` (float32, in [-1, 1]) of all codes `[K, F]`.

        `seed` keys the codec's noise, where it has some. Raises UserError for codes that do not fit.
        """
        stream = self.stream(seed)
        return torch.cat([stream.push(codes), stream.finish()])

    def check(self, codes: Tensor, first_frame: int = 0) -> Tensor:
        """Returns `codes` as int64 `[K, F]` on the codec's device; UserError names the first misfit.

        `first_frame` is the number that the error gives to column 0.
        """
        sizes = self.codebook_sizes
        if codes.ndim != 2 or codes.shape[0] != len(sizes):
            raise UserError(
                f"{self.name} takes codes [{len(sizes)} streams, frames], not {list(codes.shape)}: pass one row per stream"
            )
        if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            raise UserError(f"{self.name} takes integer codes, not {codes.dtype}: convert them first")
        codes = codes.to(torch.long)
        # Compared on their own device: on the codec's, the result would wait for all queued work.
        bad = (codes < 0) | (codes >= _column(sizes, codes.device))
        if bool(bad.any()):
            frame, stream = bad.t().nonzero()[0].tolist()
            raise UserError(
                f"code {int(codes[stream, frame])} in stream {stream}, frame {first_frame + frame} is not in "
                f"{self.name}'s 0 to {sizes[stream] - 1}: strip special ids before decoding"
            )
        return to_device(codes, self.device) if codes.device.type == "cpu" else codes.to(self.device)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Turns gradients off, and full precision on, whatever precision the caller's model runs in.

        What a stream keeps is not made as a tensor of inference mode, even where the caller is in it: the stream's next call
        may come from a thread that is not, where PyTorch would refuse to change it.
        """
        exact = _exact_convolutions() if self.device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False), exact:
            yield

    @abstractmethod
    def stream(self, seed: int = 0) -> CodecStream:
        """A new decoding stream, independent of every other; see `CodecStream`."""

    def batch(self) -> CodecBatch:
        """A batch of any number of streams, several by one call; a codec that decodes them together has its own."""
        return CodecBatch(self)

    @abstractmethod
    def _encode(self, audio: Tensor) -> Tensor:
        """Codes `[K, frames(S)]` of checked float32 sound `[S]`, S > 0, on the codec's device."""


class CodecStream(ABC):
    """Decodes frames as they come: all pushes and the finish, joined, equal `decode` of all frames at once.

    This holds bitwise, whatever the split into pushes. A stream belongs to one thread at a time; different
    streams may run interleaved or in different threads.
    """

    def __init__(self, codec: AudioCodec) -> None:
        self.codec = codec
        self.pushed = self.returned = 0  # frames and samples so far
        self.finished = False

    def push(self, codes: Tensor) -> Tensor:
        """Takes the next frames `[K, f]`, f >= 0; returns the samples `[n]` that became exact, maybe none.

        Raises UserError for codes that do not fit (nothing is taken then), and after `finish`.
        """
        if self.finished:
            raise UserError(f"this {self.codec.name} stream is finished: open a new one for more frames")
        codes = self.codec.check(codes, self.pushed)
        if codes.shape[1] == 0:
            return self._nothing()
        self.pushed += codes.shape[1]
        with self.codec._plain(), named(f"codec {self.codec.name}"):
            sound = self._push(codes)
            self.returned += len(sound)
        return sound

    def finish(self) -> Tensor:
        """Ends the stream and returns the remaining samples `[n]`; a second call returns none."""
        if self.finished or not self.pushed:
            self.finished = True
            return self._nothing()
        self.finished, name = True, self.codec.name
        with self.codec._plain(), named(f"codec {name}"):
            rest = self._finish()
            made, whole = self.returned + len(rest), self.pushed * self.codec.frame_samples
        if made != whole:
            raise UserError(f"{name} made {made} samples of {self.pushed} frames; its frame_samples asks for {whole}")
        return rest

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device=self.codec.device)

    @abstractmethod
    def _push(self, codes: Tensor) -> Tensor:
        """`push` for checked codes `[K, f]`, f > 0, on the codec's device."""

    @abstractmethod
    def _finish(self) -> Tensor:
        """`finish` of a stream that has taken at least one frame; called once."""


_NOTHING = torch.empty(0, dtype=torch.float32)


class CodecBatch:
    """Decodes several streams in a call; this one takes `CodecStream`s in turn, which serves every codec.

    Sounds are float32 `[S]` on the host, each in memory of its own: one copy brings those of a call from the codec's device.
    Codes are best on the host too, where looking at their values waits for nothing. A sound that is not finite is a failure.

    A batch belongs to one thread at a time. Numbers of streams are never used again: what comes late for a closed stream finds
    a failure, not another stream.
    """

    def __init__(self, codec: AudioCodec) -> None:
        self.codec = codec
        self._numbers = itertools.count()
        self._states: dict[int, Any] = {}
        self._gpu: torch.cuda.Stream | None = None
        if codec.device.type == "cuda":
            self._gpu = torch.cuda.Stream(codec.device)
            self._gpu.wait_stream(torch.cuda.current_stream(codec.device))  # where the weights were made

    def __len__(self) -> int:
        """Number of open streams."""
        return len(self._states)

    def open(self, seed: int = 0) -> int:
        """Starts a stream, at any time, and returns its number; `seed` keys the codec's noise, where it has some."""
        number = next(self._numbers)
        with self._beside():
            self._states[number] = self._start(seed)
        return number

    def push(self, streams: Sequence[int], codes: Tensor) -> list[Tensor | Exception]:
        """Takes the next frames of N different streams, `codes` `[N, K, f]`; returns the samples of each that became exact.

        A failure of one stream stands in its place, and the stream is closed: codes out of range, a sound that is not finite, a
        stream that is not open. Raises UserError for codes of another shape or type.
        """
        if codes.ndim != 3 or len(codes) != len(streams):
            n, name = len(streams), self.codec.name
            raise UserError(f"{n} {name} streams take codes [{n}, codebooks, frames], not {list(codes.shape)}")
        results = self._absent(streams)
        with self._beside():
            joined = codes.transpose(0, 1).flatten(1)  # [K, N * f], one stream after another
            self.codec.check(joined[:, :0])  # number of codebooks, and type
            try:
                checked = self.codec.check(joined)
            except UserError:
                results |= self._misfits(streams, codes)
            fit = [n for n, stream in enumerate(streams) if stream not in results]
            if fit and codes.shape[2]:
                if len(fit) < len(streams):
                    checked = self.codec.check(codes[fit].transpose(0, 1).flatten(1))
                checked = checked.unflatten(1, (len(fit), -1)).transpose(0, 1)
                results |= self._sounds([streams[n] for n in fit], checked)
        return [results.get(stream, _NOTHING) for stream in streams]

    def finish(self, streams: Sequence[int]) -> list[Tensor | Exception]:
        """Ends streams, and returns the remaining samples of each, or its failure."""
        results = self._absent(streams)
        begun = [stream for stream in streams if stream not in results and self._states[stream].pushed]
        if begun:
            with self._beside():
                results |= self._sounds(begun, None)
        for stream in streams:
            self.close(stream)
        return [results.get(stream, _NOTHING) for stream in streams]

    def close(self, stream: int) -> None:
        """Drops a stream without its rest; does nothing where it is closed."""
        state = self._states.pop(stream, None)
        if state is not None:
            with self._beside():
                self._stop(state)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Computes as the codec does; on a GPU beside what others queue there, for which nothing waits."""
        with self.codec._plain(), torch.cuda.stream(self._gpu) if self._gpu else contextlib.nullcontext():
            yield

    def _absent(self, streams: Sequence[int]) -> dict[int, Tensor | Exception]:
        """Failures of the streams that are not open."""
        closed = f"{self.codec.name} stream {{}} is not open (finished, closed, or failed): open a new one"
        return {stream: UserError(closed.format(stream)) for stream in streams if stream not in self._states}

    def _misfits(self, streams: Sequence[int], codes: Tensor) -> dict[int, Tensor | Exception]:
        """Failures of open streams whose codes do not fit; these are closed."""
        failed: dict[int, Tensor | Exception] = {}
        for stream, own in zip(streams, codes, strict=True):
            try:
                if stream in self._states:
                    self.codec.check(own, self._states[stream].pushed)
            except UserError as error:
                failed[stream] = error
                self.close(stream)
        return failed

    def _sounds(self, streams: Sequence[int], codes: Tensor | None) -> dict[int, Tensor | Exception]:
        """Sounds on the host of checked `codes` `[N, K, f]`, or the ends of streams; failed streams are closed."""
        states, joined = [self._states[stream] for stream in streams], _NOTHING
        try:
            sounds = self._decode(states, codes)
            if tensors := [sound for sound in sounds if isinstance(sound, Tensor)]:
                joined = torch.cat(tensors).cpu()
            if any(sound.device.type != "cpu" for sound in tensors):
                here = iter(joined.split([len(sound) for sound in tensors]))
                sounds = [next(here).clone() if isinstance(sound, Tensor) else sound for sound in sounds]
        except Exception as error:  # a failure of all together: nobody knows what was computed of whom
            sounds = [error] * len(states)
        finite = bool(joined.isfinite().all())
        for n, (stream, state, sound) in enumerate(zip(streams, states, sounds, strict=True)):
            if isinstance(sound, Tensor) and not finite and not bool(sound.isfinite().all()):
                made = f"{self.codec.name} made a sound that is not finite by frame {state.pushed - 1}"
                sounds[n] = UserError(f"{made}: its weights are damaged")
            if isinstance(sounds[n], Exception):
                self.close(stream)
        return dict(zip(streams, sounds, strict=True))

    def _start(self, seed: int) -> Any:
        """Returns the state of a new stream, whose attribute `pushed` counts the frames that it has taken."""
        return self.codec.stream(seed)

    def _decode(self, states: Sequence[Any], codes: Tensor | None) -> list[Tensor | Exception]:
        """Sounds, on any device, or failures, of checked codes `[N, K, f]` on the codec's device, f > 0, which are counted; for
        None the rests of streams that have taken at least one frame each."""
        sounds: list[Tensor | Exception] = []
        for n, stream in enumerate(states):
            try:
                sounds.append(stream.finish() if codes is None else stream.push(codes[n]))
            except Exception as error:
                sounds.append(error)
        return sounds

    def _stop(self, state: Any) -> None:
        """Frees the state of a stream, finished or not; what a `CodecStream` keeps goes with it."""
