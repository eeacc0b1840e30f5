"""Sound as codes, on its way to listeners of another process: that one decodes it, where the codec can do so anywhere.

What the engine's process does for each listener's sound delays all others, since one lock of the interpreter is shared by its
threads. So a codec without weights decodes on the listeners' side, the sound of all answers of a message in one call.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.errors import UserError
from omni.generate.results import AudioChunk, Ended


class CodedSound(NamedTuple):
    """The next frames of an answer, A codes each; an `AudioChunk` once they are decoded.

    Attributes:
        start, end: where they are in the answer's sound, in seconds.
    """

    codes: list[list[int]]
    start: float
    end: float


def is_portable(codec: AudioCodec) -> bool:
    """Whether listeners of another process decode: a codec says so, and needs no later frame for a frame's samples."""
    return codec.portable and codec.exact_samples(1) == codec.frame_samples


def cannot_decode(codec: AudioCodec, error: Exception) -> str:
    """What is told of an answer whose codes the codec refuses."""
    return f"codec {codec.name} cannot decode the answer ({error}); generate([...], sound=False) gives its codes"


class SoundDecoder:
    """Decodes the answers of an engine's process; belongs to one thread.

    Attributes:
        codec: what decodes.
        seconds: CPU time that it took.
    """

    def __init__(self, codec: AudioCodec) -> None:
        self.codec, self._batch = codec, codec.batch()
        self._streams: dict[int, int] = {}  # of the batch, by the numbers of answers
        first = self._batch.open()  # what is loaded and compiled for the first frame, nobody waits for
        self._batch.push([first], torch.zeros(1, len(codec.codebook_sizes), 1, dtype=torch.long))
        self._batch.close(first)
        self.seconds = 0.0

    def __call__(self, answers: Sequence[tuple[int, list[Any]]]) -> dict[int, Exception]:
        """Put chunks in the places of coded sound among the events of answers; returns why some cannot be decoded, by their
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
    """Put the chunks of a sound [S] in the places of coded ones, or leave these out."""
    kept, place = [], 0
    for event in events:
        if not isinstance(event, CodedSound):
            kept.append(event)
        elif sound is not None:
            end = place + frame_samples * len(event.codes)
            whole = sound if end - place == len(sound) else sound[place:end].clone()
            kept.append(AudioChunk(whole, event.start, event.end))
            place = end
    events[:] = kept
