"""The contract of an audio codec: frames of K parallel codes in, sound out, whole or as a stream.

Dimensions: K stream (codebook), F frame, S sample. The model sees `[K, F]` codes and never asks which codec
they belong to. Code that turns codes into sound opens a `stream()`, pushes frames as they are produced, and
gets exactly the samples that `decode` of all frames would give, as early as they can be known.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from omni.codec.batch import CodecBatch, StreamsInTurn
from omni.codec.streams import on_device
from omni.errors import UserError
from omni.plugins import named

_CONVOLUTIONS: Any = getattr(torch.backends.cudnn, "conv")  # noqa: B009 PyTorch does not type it


class _ExactConvolutions:
    """A context in which cuDNN's convolutions do not round their inputs to TF32, as they do by default.

    PyTorch has one flag for the process: the first of several threads turns it off, and the last one puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = _CONVOLUTIONS.fp32_precision
                _CONVOLUTIONS.fp32_precision = "ieee"
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _CONVOLUTIONS.fp32_precision = self._before


_EXACT = _ExactConvolutions()


@functools.cache
def _column(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)[:, None]


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
        wanted, found = (
            [len(self.codebook_sizes), self.frames(audio.numel())],
            list(getattr(codes, "shape", [type(codes).__name__])),
        )
        if found != wanted:
            raise UserError(f"{self.name} made codes {found} of {audio.numel()} samples; its sizes ask for {wanted}")
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
        return on_device(codes, self.device)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Turns gradients off, and full precision on, whatever precision the caller's model runs in.

        What a stream keeps is not made as a tensor of inference mode, even where the caller is in it: the stream's next call
        may come from a thread that is not, where PyTorch would refuse to change it.
        """
        exact = _EXACT if self.device.type == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False), exact:
            yield

    @abstractmethod
    def stream(self, seed: int = 0) -> CodecStream:
        """A new decoding stream, independent of every other; see `CodecStream`."""

    def batch(self) -> CodecBatch:
        """A batch that decodes any number of streams, with one call for several; see `CodecBatch`.

        This one takes streams in turn, which serves every codec. A codec that decodes several together returns its own.
        """
        return StreamsInTurn(self)

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
        flush = not self.finished and self.pushed > 0
        self.finished = True
        with self.codec._plain(), named(f"codec {self.codec.name}"):
            rest = self._finish() if flush else self._nothing()
            made, whole = self.returned + len(rest), self.pushed * self.codec.frame_samples
        if flush and made != whole:
            name = self.codec.name
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
