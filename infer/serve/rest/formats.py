"""Sound of responses at 24 kHz, as OpenAI's: raw and in files, whole and while it is made.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

import io
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import soundfile

from infer.resampler import Resampler
from infer.serve.realtime.configuration import PCM_RATE
from infer.serve.sound import encode
from omni.generate.results import AudioChunk
from omni.generate.results import Event as Output

FILES = {"mp3": ("MP3", None), "flac": ("FLAC", None), "opus": ("OGG", "OPUS")}
"""libsndfile's names of the formats that are written when the sound is whole."""

MEDIA = {
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
"""Media types by format."""

UNKNOWN = 0xFFFFFFFF
"""Bytes of a WAV file whose length is not known yet: players read to its end."""

_BLOCK = 1 << 16  # samples that are encoded at a time
_LEAST = PCM_RATE // 100  # samples of a file: those of some formats are none without any


def wav_header(count: int = UNKNOWN) -> bytes:
    """The 44 bytes before `count` bytes of 16-bit mono samples at 24 kHz."""
    form = struct.pack("<HHIIHH", 1, 1, PCM_RATE, PCM_RATE * 2, 2, 16)
    riff = count if count == UNKNOWN else 36 + count
    head = b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + struct.pack("<I", len(form))
    return head + form + b"data" + struct.pack("<I", count)


def encoded(samples: np.ndarray, form: str) -> bytes:
    """Samples [S] at 24 kHz in one of the formats of `MEDIA`; what is beyond -1 to 1 is clipped."""
    if form not in FILES:
        data = encode(samples, "audio/pcm")
        return wav_header(len(data)) + data if form == "wav" else data
    samples = np.pad(np.clip(samples, -1, 1), (0, max(_LEAST - len(samples), 0)))
    container, coding = FILES[form]
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", PCM_RATE, 1, format=container, subtype=coding) as file:
        for start in range(0, len(samples), _BLOCK):
            file.write(samples[start : start + _BLOCK])
    return out.getvalue()


class Sounding:
    """An answer's sound at 24 kHz, as it comes.

    Args:
        rate: of the engine's sound, in Hz.
    """

    def __init__(self, rate: int) -> None:
        self._rate = Resampler(rate, PCM_RATE)

    def push(self, chunk: AudioChunk) -> np.ndarray:
        """Samples [S] that are known with the next chunk."""
        return self._rate.push(chunk.samples.numpy())

    def finish(self) -> np.ndarray:
        """The rest."""
        return self._rate.finish()


def joined(chunks: Iterable[AudioChunk], rate: int) -> np.ndarray:
    """Samples [S] at 24 kHz of all chunks of an answer at `rate` samples per second."""
    sounding = Sounding(rate)
    pieces: list[Any] = [sounding.push(chunk) for chunk in chunks]
    return np.concatenate([*pieces, sounding.finish()])


async def raw(events: AsyncIterator[Output], rate: int) -> AsyncIterator[bytes]:
    """16-bit samples at 24 kHz of an answer's sound, as it comes."""
    sounding = Sounding(rate)
    async for event in events:
        if isinstance(event, AudioChunk) and len(samples := sounding.push(event)):
            yield encode(samples, "audio/pcm")
    if len(samples := sounding.finish()):
        yield encode(samples, "audio/pcm")
