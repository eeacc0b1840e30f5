"""Sound that is sent: a recording or a made one, as 16-bit PCM at 24 kHz or G.711, and a microphone that never stops."""

from __future__ import annotations

import asyncio
import io
import types

import numpy as np
import soundfile

from tests.realtime.connection import RealtimeClient

RATE, G711_RATE = 24_000, 8_000
"""Samples per second of `audio/pcm`, and of `audio/pcmu` and `audio/pcma`."""

SUBTYPES = {"audio/pcmu": "ULAW", "audio/pcma": "ALAW"}
"""libsndfile's names of G.711."""

PIECE = 0.04
"""Seconds of a microphone's pieces."""


def read_question(path: str) -> np.ndarray:
    """Samples [S] of a sound file, int16 at 24 kHz; UserError where it is none."""
    from omni.audio.io import read_audio

    return _pcm16(read_audio(path, RATE, max_seconds=60).numpy())


def made_question(seconds: float = 1.2) -> np.ndarray:
    """A buzz in syllables, [S] int16 at 24 kHz: sound to answer, which nothing needs to take for speech."""
    time = np.arange(round(seconds * RATE)) / RATE
    buzz = sum(np.sin(2 * np.pi * 140 * n * time) / n for n in range(1, 20))
    return _pcm16(0.1 * buzz * np.sin(np.pi * 4 * time) ** 2)


def _pcm16(samples: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2")


def without_silence(sound: np.ndarray) -> np.ndarray:
    """The sound from its first loud sample on."""
    loud = np.abs(sound.astype(np.int32))
    return sound[int(np.argmax(loud > 0.1 * loud.max())) :]


def g711(sound: np.ndarray, form: str) -> bytes:
    """G.711 of samples [S] at 24 kHz."""
    thirds = sound[: len(sound) // 3 * 3].reshape(-1, 3).astype(np.float32).mean(1) / 32768
    out = io.BytesIO()
    soundfile.write(out, thirds, G711_RATE, format="RAW", subtype=SUBTYPES[form])
    return out.getvalue()


class Microphone:
    """Sends what is said in real time, and silence before and after; a context manager."""

    def __init__(self, client: RealtimeClient) -> None:
        self._client = client
        self._waiting = np.zeros(0, "<i2")

    def say(self, sound: np.ndarray) -> None:
        """Say this as soon as what was said before has gone."""
        self._waiting = np.concatenate([self._waiting, sound])

    async def __aenter__(self) -> Microphone:
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, where: types.TracebackType | None) -> None:
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        size, due = round(PIECE * RATE), self._client.now
        while True:
            piece, self._waiting = self._waiting[:size], self._waiting[size:]
            await self._client.append(np.pad(piece, (0, size - len(piece))).tobytes())
            due += PIECE
            await asyncio.sleep(due - self._client.now)
