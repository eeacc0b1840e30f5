"""Messages between an engine's process and the process of its clients: pickles, with sound as samples or as codes.

Both ends belong to the same program, so pickles are safe here.

What the engine's process does for each listener's sound delays all others, since one lock of the interpreter is shared by its
threads. So a codec without weights decodes on the listeners' side, the sound of all answers of a message in one call.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.config import ModelConfig
from omni.errors import BusyError, RoomError, UserError
from omni.generate.results import AudioChunk, Ended

LARGEST = 1 << 28
"""Bytes of the largest message that a client may send."""


class EngineLost(UserError):
    """The engine's process has ended; another can be started."""


Item = tuple[Any, ...]
"""Content of a message: its name first."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model in the engine's process, for its clients.

    Attributes:
        shown: its `repr`.
        codec: the codec's name, None without one; sample_rate: in Hz, and frame_rate: frames a second (0 without one).
        portable: whether listeners' processes decode.
    """

    config: ModelConfig
    shown: str
    codec: str | None = None
    sample_rate: int = 0
    frame_rate: float = 0.0
    portable: bool = False

    @classmethod
    def of(cls, config: ModelConfig, shown: str, codec: AudioCodec | None) -> ModelFacts:
        if codec is None:
            return cls(config, shown)
        return cls(config, shown, codec.name, codec.sample_rate, codec.frame_rate, is_portable(codec))


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays, which is quicker; each that is read has memory of its own, and does not keep the message."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.dtype == torch.bfloat16:
            return NotImplemented
        return torch.from_numpy, (value.numpy(force=True),)


def pack(items: Sequence[Item]) -> bytes:
    """One message of items."""
    message = io.BytesIO()
    _Pickler(message, protocol=5).dump(items)
    return message.getvalue()


def unpack(message: bytes) -> list[Item]:
    """The items of a message."""
    items: list[Item] = pickle.loads(message)
    return items


def pack_request(name: str, item: Item) -> bytes:
    """One message of a client. UserError: it cannot be pickled, or is larger than `LARGEST`."""
    try:
        message = pack([item])
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{name} cannot be sent to the engine's process ({' '.join(str(error).split())}); give values without open files, "
            "functions or locks"
        ) from error
    if len(message) > LARGEST:
        raise UserError(f"{name} takes {len(message) >> 20} MiB, and {LARGEST >> 20} MiB is the most that is sent; give less")
    return message


def pack_error(error: BaseException) -> tuple[str, str]:
    """Name and text of an exception."""
    names = [name for name in _ERRORS if isinstance(error, _ERRORS[name])]
    if names:
        return names[0], str(error)
    return "RuntimeError", f"in the engine's process: {type(error).__name__}: {error}"


def unpack_error(name: str, text: str) -> BaseException:
    return _ERRORS.get(name, RuntimeError)(text)


_ERRORS: dict[str, type[BaseException]] = {
    "EngineLost": EngineLost, "BusyError": BusyError, "RoomError": RoomError, "UserError": UserError, "TypeError": TypeError,
    "MemoryError": MemoryError, "OutOfMemoryError": torch.OutOfMemoryError,
}  # fmt: skip


class CodedSound(NamedTuple):
    """The next frames of an answer, A codes each; an `AudioChunk` once they are decoded. `start`, `end`: where they are in
    the answer's sound, in seconds."""

    codes: list[list[int]]
    start: float
    end: float


def is_portable(codec: AudioCodec) -> bool:
    """Whether listeners of another process decode: a codec says so, and needs no later frame for a frame's samples."""
    return codec.portable and codec.exact_samples(1) == codec.frame_samples


def cannot_decode(codec: AudioCodec, error: Exception) -> str:
    """Error text of an answer whose codes the codec refuses."""
    return f"codec {codec.name} cannot decode the answer ({error}); generate([...], sound=False) gives its codes"


class SoundDecoder:
    """Decodes the answers of an engine's process; belongs to one thread.

    Attributes:
        seconds: CPU time that decoding took.
    """

    def __init__(self, codec: AudioCodec) -> None:
        self.codec, self._batch = codec, codec.batch()
        self._streams: dict[int, int] = {}  # of the batch, by the numbers of answers
        first = self._batch.open()  # what is loaded and compiled for the first frame, nobody waits for
        self._batch.push([first], torch.zeros(1, len(codec.codebook_sizes), 1, dtype=torch.long))
        self._batch.close(first)
        self.seconds = 0.0

    def __call__(self, answers: Sequence[tuple[int, list[Any]]]) -> dict[int, Exception]:
        """Replaces coded sound among the events of answers by chunks; returns why some cannot be decoded, by their
        numbers. Their sound is left out."""
        start, failed = time.thread_time(), dict[int, Exception]()
        alike: dict[int, list[tuple[int, list[Any]]]] = {}  # by number of frames
        for number, events in answers:
            if count := sum(len(event.codes) for event in events if isinstance(event, CodedSound)):
                alike.setdefault(count, []).append((number, events))
        for alike_streams in alike.values():
            self._decode(alike_streams, failed)
        for number, events in answers:
            if number in failed or any(isinstance(event, Ended) for event in events):
                self.close(number)
        self.seconds += time.thread_time() - start if alike else 0.0
        return failed

    def _decode(self, answers: Sequence[tuple[int, list[Any]]], failed: dict[int, Exception]) -> None:
        """Decode as many frames of each of some answers."""
        able, frames = [], []
        for number, events in answers:
            try:
                if number not in self._streams:
                    self._streams[number] = self._batch.open()
            except Exception as error:
                failed[number] = error
                _replace(events, None)
                continue
            able.append((number, events))
            frames.append([frame for event in events if isinstance(event, CodedSound) for frame in event.codes])
        if not able:
            return
        codes = torch.from_numpy(np.array(frames)).transpose(1, 2)  # [N, K, f]
        sounds: list[Tensor | Exception]
        try:
            sounds = self._batch.push([self._streams[number] for number, _ in able], codes)
        except Exception as error:  # of the call as a whole: the thread goes on for others
            sounds = [error] * len(able)
        wanted = codes.shape[2] * self.codec.frame_samples
        for (number, events), sound in zip(able, sounds, strict=True):
            if isinstance(sound, Tensor) and len(sound) != wanted:
                made = f"{self.codec.name} made {len(sound)} samples of {codes.shape[2]} frames"
                sound = UserError(f"{made}; its frame_samples asks for {wanted}")
            if isinstance(sound, Exception):
                failed[number] = sound
            _replace(events, sound if isinstance(sound, Tensor) else None, self.codec.frame_samples)

    def close(self, number: int) -> None:
        """Drop an answer's decoder, where it has one."""
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._batch.close(stream)

    def keep(self, wanted: Container[int]) -> None:
        """Drop the decoders of other answers."""
        for number in [number for number in self._streams if number not in wanted]:
            self.close(number)


def _replace(events: list[Any], sound: Tensor | None, frame_samples: int = 0) -> None:
    """Replaces coded chunks among events by those of a sound [S], or leaves them out."""
    kept, position = [], 0
    for event in events:
        if not isinstance(event, CodedSound):
            kept.append(event)
        elif sound is not None:
            end = position + frame_samples * len(event.codes)
            whole = sound if end - position == len(sound) else sound[position:end].clone()
            kept.append(AudioChunk(whole, event.start, event.end))
            position = end
    events[:] = kept
