"""`omni-infer bench --server URL`: people who talk to a server over WebSockets, for several numbers of them.

Each says the question in real time, waits for the end of the answer as it plays, keeps silent for a moment, and asks again.
A chunk is late where a player without a buffer that began with the first one has nothing left to play.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from infer.bench.live.figures import lined
from infer.progress import WorkBar
from infer.tls import connection_error
from omni.errors import UserError

RATE, PIECE = 24_000, 0.04
"""Samples per second, and seconds of one append."""

PAUSE = (0.3, 1.5)
"""Seconds of silence, from and to, before the next question."""

AFTER = 1.2
"""Seconds of silence after a question whose end the server finds by voice activity."""

COLUMNS = ("sockets", "answers", "chunks", "late", "p99 ms", "first audio ms", "endpointing ms", "stops after ms", "errors")

PATIENCE = 30.0
"""Seconds after which an answer that has not ended counts as an error."""


@dataclass
class Noted:
    """What all people of one number noted.

    Attributes:
        first: seconds from the commit of a question to its answer's first sound.
        endpointing: seconds from the end of speech to the commit, where the server finds it.
        late: seconds by which each chunk came after it was due; below zero it was early.
        stopping: seconds from `speech_started` to the last sound of the answer that it interrupts.
        errors: messages of errors, and of answers that did not end.
    """

    answers: int = 0
    interrupted: int = 0
    first: list[float] = field(default_factory=list)
    endpointing: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    stopping: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SocketFigures:
    """The figures of one number of people, in milliseconds."""

    people: int
    answers: int
    chunks: int
    underruns: int
    first_audio: tuple[float, float, float] | None
    endpointing: tuple[float, float, float] | None
    lateness_p99: float | None
    stopping_p95: float | None
    errors: int
    example: str

    @classmethod
    def of(cls, people: int, noted: Noted) -> SocketFigures:
        return cls(
            people=people,
            answers=noted.answers,
            chunks=len(noted.late),
            underruns=sum(late > 0 for late in noted.late),
            first_audio=_percentiles(noted.first),
            endpointing=_percentiles(noted.endpointing),
            lateness_p99=_percentile(noted.late, 99),
            stopping_p95=_percentile(noted.stopping, 95),
            errors=len(noted.errors),
            example=noted.errors[0] if noted.errors else "",
        )


def _percentile(values: Sequence[float], of: int) -> float | None:
    return round(float(np.percentile(values, of)) * 1000, 1) if values else None


def _percentiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    return tuple(_percentile(values, of) for of in (50, 95, 99)) if values else None  # type: ignore[return-value]


def play_sockets(
    url: str,
    key: str | None,
    sound: np.ndarray,
    numbers: Sequence[int],
    seconds: float,
    detection: str,
    barge_in: float,
    trust: ssl.SSLContext | None = None,
) -> list[SocketFigures]:
    """Play all numbers of people.

    Args:
        url: of the server, as `ws://127.0.0.1:8000/v1`.
        sound: the question [S] at 24 kHz.
        detection: `manual`, `server_vad` or `semantic_vad`.
        barge_in: share of the answers that the next question interrupts; only where the server finds the ends of turns.
        trust: TLS for a certificate that is no public one.

    Raises:
        UserError: the server cannot be reached, or refuses a session.
    """
    found: list[SocketFigures] = []
    with WorkBar("talking", unit="s") as bar:
        for number in numbers:
            noted, done = Noted(), len(found) * seconds
            people = [SocketPerson(url, key, sound, detection, barge_in, noted, seed, trust) for seed in range(number)]
            tell = partial(_tell, bar, done, len(numbers) * seconds, f"{number} sockets")
            asyncio.run(_play(people, seconds, tell))
            found.append(SocketFigures.of(number, noted))
    return found


def _tell(bar: WorkBar, before: float, total: float, note: str, at: float) -> None:
    bar(before + at, total, note)


async def _play(people: Sequence[SocketPerson], seconds: float, tell: Callable[[float], None]) -> None:
    ends = time.monotonic() + seconds
    talking = [asyncio.create_task(person.talk(ends)) for person in people]
    while not all(task.done() for task in talking):
        await asyncio.wait(talking, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
        tell(min(seconds - (ends - time.monotonic()), seconds))
        for task in talking:
            if task.done() and task.exception() is not None:
                for other in talking:
                    other.cancel()
                raise task.exception()  # type: ignore[misc]


class SocketPerson:
    """One socket, and who talks over it."""

    def __init__(
        self,
        url: str,
        key: str | None,
        sound: np.ndarray,
        detection: str,
        barge_in: float,
        noted: Noted,
        seed: int,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._trust: dict[str, Any] = {} if trust is None else {"ssl": trust}
        self._url, self._key, self._detection, self._barge_in, self._noted = url, key, detection, barge_in, noted
        pcm = (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()
        step = round(PIECE * RATE) * 2
        self._pieces = [self._append(pcm[place : place + step]) for place in range(0, len(pcm), step)]
        self._silence = self._append(bytes(step))
        self._random = random.Random(seed)
        self._over, self._sounding = asyncio.Event(), asyncio.Event()
        self._spoke: float | None = None
        self._known = 0.0
        self._plays: float | None = None
        self._last_sound = self._started = 0.0

    @staticmethod
    def _append(data: bytes) -> str:
        return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})

    async def talk(self, ends: float) -> None:
        """Ask until a time by `time.monotonic`."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, WebSocketException

        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        ways: dict[str, Any] = {"additional_headers": headers, "compression": None, "max_size": None}
        await asyncio.sleep(self._random.uniform(0, min(2.0, (ends - time.monotonic()) / 4)))
        try:
            async with connect(f"{self._url}/realtime", **ways, **self._trust) as ws:
                reading = asyncio.create_task(self._read(ws))
                try:
                    await self._converse(ws, ends)
                finally:
                    reading.cancel()
        except ConnectionClosed as error:
            code, reason = (1006, "") if error.rcvd is None else (error.rcvd.code, error.rcvd.reason)
            raise UserError(f"{self._url} closed a session (code {code}): {reason or 'it gave no reason'}") from error
        except (OSError, WebSocketException) as error:
            way = "" if isinstance(error, ssl.SSLCertVerificationError) else "; is a server there?"
            raise UserError(f"{self._url}: {connection_error(error)}{way}") from error

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
            kind = event["type"]
            if kind == "input_audio_buffer.committed":
                self._known, self._plays = now, None
                if self._detection != "manual" and self._spoke is not None:  # else it ended in a pause of the question
                    noted.endpointing.append(now - self._spoke)
            elif kind == "input_audio_buffer.speech_started":
                self._started = now
            elif kind == "response.output_audio.delta":
                self._note_sound(len(event["delta"]) * 3 / 8 / RATE, now)
            elif kind == "response.done":
                noted.answers += 1
                self._sounding.clear()
                details = event["response"].get("status_details") or {}
                if details.get("reason") == "turn_detected":
                    noted.interrupted += 1
                    noted.stopping.append(max(self._last_sound - self._started, 0.0))
                elif event["response"]["status"] == "failed":
                    noted.errors.append(details["error"]["message"])
                if details.get("reason") != "turn_detected":
                    self._over.set()
            elif kind == "error":
                noted.errors.append(event["error"]["message"])

    def _note_sound(self, seconds: float, now: float) -> None:
        self._last_sound = now
        self._sounding.set()
        if self._plays is None:
            self._noted.first.append(now - self._known)
            self._plays = now
        else:
            late = now - self._plays
            self._noted.late.append(late)
            self._plays += max(late, 0.0)
        self._plays += seconds


def show_sockets(figures: Sequence[SocketFigures], title: str) -> None:
    """Print the figures."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 132)
    console.print(lined(title, COLUMNS, [_cells(one) for one in figures]))
    console.print("first audio after the end of a turn is known, and endpointing: 50th, 95th, 99th percentile")


def _cells(one: SocketFigures) -> list[str]:
    def shown(*values: float | None) -> str:
        return " ".join("" if value is None else f"{value:,.0f}" for value in values)

    first, ends = shown(*(one.first_audio or ())), shown(*(one.endpointing or ()))
    counts = str(one.people), f"{one.answers:,}", f"{one.chunks:,}", str(one.underruns)
    return [*counts, shown(one.lateness_p99), first, ends, shown(one.stopping_p95), str(one.errors)]


def plain_figures(figures: Sequence[SocketFigures]) -> list[dict[str, Any]]:
    """The figures for JSON."""
    return [asdict(one) for one in figures]
