"""People who talk to a server of the Realtime API over WebSockets, for several numbers of them.

python -m benchmarks.sockets [--url URL] [--question FILE] [--numbers 8,32] [--turns server_vad] [--seconds 60] [--key KEY]

Each says the question in real time, waits for the end of the answer as it plays, keeps silent for a moment, and asks again.
A chunk is late where a player without a buffer that began with the first one has nothing left to play.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Figures, in_ms, run_checks
from infer.bench.bench import noise
from infer.timing import Player
from omni.audio.io import SAMPLE_RATE, read_audio
from omni.audio.resample import resample
from omni.audio.wav import pcm16
from omni.engine.stats import Percentiles

RATE, PIECE = 24_000, 0.04
"""Samples per second, and seconds of one append."""
PAUSE, AFTER = (0.3, 1.5), 1.2
"""Seconds of silence before the next question, and after one whose end the server finds by voice activity."""
PATIENCE = 30.0
"""Seconds after which an answer that has not ended counts as an error."""


@dataclass
class Noted:
    """The times that all people of one run noted, in seconds.

    Attributes:
        first: from the commit of a question to its answer's first sound.
        endpointing: from the end of speech to the commit, where the server finds it.
        late: by which each chunk came after it was due; below zero it was early.
        stopping: from `speech_started` to the last sound of the answer that it interrupts.
        errors: messages of errors, and of answers that did not end.
    """

    answers: int = 0
    first: list[float] = field(default_factory=list)
    endpointing: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    stopping: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Counts, and percentiles in milliseconds."""
        figures: dict[str, float] = {"answers": self.answers, "chunks": len(self.late), "errors": len(self.errors)}
        figures["late"] = sum(late > 0 for late in self.late)
        for name in ("first", "endpointing", "late", "stopping"):
            figures |= in_ms(name, Percentiles.of(getattr(self, name)))
        return figures


def talk(
    device: torch.device, small: bool, url: str, question: str, numbers: str, turns: str, seconds: str, barge_in: str, key: str
) -> Figures:
    """People of each number; ends of turns by the client (`manual`), `server_vad` or `semantic_vad`."""
    sound = read_audio(question, RATE) if question else resample(noise(2.0), SAMPLE_RATE, RATE)
    share = 0.0 if turns == "manual" else float(barge_in)
    for number in map(int, numbers.split(",")):
        noted = Noted()
        people = [SocketPerson(url.rstrip("/"), key or None, sound, turns, share, noted, seed) for seed in range(number)]
        asyncio.run(_play(people, 3.0 if small else float(seconds)))
        yield f"{number} sockets, {turns}", noted.figures()
        if noted.errors:
            print(f"such as: {noted.errors[0]}")


async def _play(people: Sequence[SocketPerson], seconds: float) -> None:
    ends = time.monotonic() + seconds
    await asyncio.gather(*[person.talk(ends) for person in people])


class SocketPerson:
    """One socket, and who talks over it."""

    def __init__(
        self,
        url: str,
        key: str | None,
        sound: Tensor,
        detection: str,
        barge_in: float,
        noted: Noted,
        seed: int,
    ) -> None:
        self._url, self._key, self._detection, self._barge_in, self._noted = url, key, detection, barge_in, noted
        pcm, step = pcm16(sound), round(PIECE * RATE) * 2
        self._pieces = [self._append(pcm[offset : offset + step]) for offset in range(0, len(pcm), step)]
        self._silence = self._append(bytes(step))
        self._random = random.Random(seed)
        self._over, self._sounding = asyncio.Event(), asyncio.Event()
        self._spoke: float | None = None
        self._known = 0.0
        self._player = Player(RATE)
        self._last_sound = self._started = 0.0

    @staticmethod
    def _append(data: bytes) -> str:
        return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})

    async def talk(self, ends: float) -> None:
        """Ask until a time by `time.monotonic`."""
        from websockets.asyncio.client import connect

        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        await asyncio.sleep(self._random.uniform(0, min(2.0, (ends - time.monotonic()) / 4)))
        async with connect(f"{self._url}/realtime", additional_headers=headers, compression=None, max_size=None) as ws:
            reading = asyncio.create_task(self._read(ws))
            try:
                await self._converse(ws, ends)
            finally:
                reading.cancel()

    async def _converse(self, ws: Any, ends: float) -> None:
        manual = self._detection == "manual"
        detection = None if manual else {"type": self._detection}
        await ws.send(json.dumps({"type": "session.update", "session": {"audio": {"input": {"turn_detection": detection}}}}))
        while time.monotonic() < ends:
            self._spoke = None
            await self._say(ws, self._pieces)
            self._spoke = time.monotonic()
            if manual:
                await ws.send('{"type": "input_audio_buffer.commit"}')
                await ws.send('{"type": "response.create"}')
            else:
                await self._say(ws, [self._silence] * round(AFTER / PIECE))
            interrupts = not manual and self._random.random() < self._barge_in
            waiting = asyncio.create_task(asyncio.wait_for(self._answered(interrupts), PATIENCE))
            while not waiting.done():
                await self._say(ws, [self._silence])
            if waiting.exception() is not None:
                self._noted.errors.append(f"no answer within {PATIENCE:g} s")
            self._over.clear()
            pause = 0.2 if interrupts else self._random.uniform(*PAUSE)
            await self._say(ws, [self._silence] * round(pause / PIECE))
            if manual:
                await ws.send('{"type": "input_audio_buffer.clear"}')

    async def _answered(self, sounding: bool) -> None:
        """Wait for the end of an answer, or until it sounds; a short one may have ended by then."""
        waits = [asyncio.create_task(event.wait()) for event in (self._over, *[self._sounding] * sounding)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _say(self, ws: Any, pieces: Sequence[str]) -> None:
        """Send pieces of sound in real time."""
        began = time.monotonic()
        for number, piece in enumerate(pieces, 1):
            await ws.send(piece)
            await asyncio.sleep(max(began + number * PIECE - time.monotonic(), 0))

    async def _read(self, ws: Any) -> None:
        """Note what comes."""
        noted = self._noted
        async for message in ws:
            event, now = json.loads(message), time.monotonic()
            event_type = event["type"]
            if event_type == "input_audio_buffer.committed":
                self._known, self._player = now, Player(RATE)
                if self._detection != "manual" and self._spoke is not None:  # else it ended in a pause of the question
                    noted.endpointing.append(now - self._spoke)
            elif event_type == "input_audio_buffer.speech_started":
                self._started = now
            elif event_type == "response.output_audio.delta":
                self._note_sound(len(event["delta"]) * 3 // 8, now)
            elif event_type == "response.done":
                noted.answers += 1
                self._sounding.clear()
                details = event["response"].get("status_details") or {}
                if details.get("reason") == "turn_detected":
                    noted.stopping.append(max(self._last_sound - self._started, 0.0))
                elif event["response"]["status"] == "failed":
                    noted.errors.append(details["error"]["message"])
                if details.get("reason") != "turn_detected":
                    self._over.set()
            elif event_type == "error":
                noted.errors.append(event["error"]["message"])

    def _note_sound(self, samples: int, now: float) -> None:
        self._last_sound = now
        self._sounding.set()
        late = self._player.receive(samples, now)
        if late is None:
            self._noted.first.append(now - self._known)
        else:
            self._noted.late.append(late)


CHECKS = {"talk": talk}
OPTIONS = {"url": "ws://127.0.0.1:8000/v1", "question": "", "numbers": "1"}
OPTIONS |= {"turns": "manual", "seconds": "60", "barge_in": "0.1", "key": ""}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0], **OPTIONS))
