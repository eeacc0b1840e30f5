"""A microphone and a loudspeaker of the judges, in real time: 24 kHz, mono, 16 bits."""

from __future__ import annotations

import asyncio
import time
import wave
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

RATE = 24000
PIECE = 960  # bytes of 20 ms


def read(file: Path) -> bytes:
    """Sound of a WAV file."""
    with wave.open(str(file)) as sound:
        if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{file}: expected {RATE} Hz, mono, 16 bits")
        return sound.readframes(sound.getnframes())


class Loudspeaker:
    """Plays to nobody, in real time and without gaps."""

    def __init__(self) -> None:
        self._end = 0.0

    def play(self, seconds: float) -> None:
        self._end = max(self._end, time.monotonic()) + seconds

    def left(self) -> float:
        """Seconds still to be played."""
        return max(0.0, self._end - time.monotonic())

    def stop(self) -> float:
        """Throw away what was not played yet: its seconds."""
        left, self._end = self.left(), 0.0
        return left


async def in_time(sound: bytes) -> AsyncIterator[bytes]:
    """Pieces of a sound, one every 20 ms."""
    began = time.monotonic()
    for start in range(0, len(sound), PIECE):
        await asyncio.sleep(began + start / 2 / RATE - time.monotonic())
        yield sound[start : start + PIECE].ljust(PIECE, b"\0")


class Microphone:
    """Sends what is said, and silence while nothing is: a piece every 20 ms, until it is cancelled."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send, self._said = send, deque[bytes]()

    async def run(self) -> None:
        while True:
            async for silence in in_time(bytes(RATE * 2 * 60)):
                await self._send(self._said.popleft() if self._said else silence)

    async def say(self, sound: bytes) -> None:
        """Return when all of the sound was sent."""
        self._said.extend(sound[at : at + PIECE].ljust(PIECE, b"\0") for at in range(0, len(sound), PIECE))
        while self._said:
            await asyncio.sleep(0.01)
