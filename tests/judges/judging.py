"""What the judges in Python share: the conversation that each of them holds, and its report.

A judge is a client that somebody else wrote, used as its documentation shows. It asks every question aloud and hears each
answer out, but one: the last question but one interrupts the answer before it. It prints one JSON object and exits with 0
unless something raised. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from devices import Loudspeaker, read

BEGIN = 15.0  # longest wait for an answer's first sound, and for the end of an answer, in seconds
HEARD = 0.3  # of an answer before it is interrupted
PAUSE = 1.0  # between an answer and the next question
WRITTEN = "what is one plus two"  # where the client's documentation lets a written message come first


@dataclass
class Turn:
    """A question and what the client was told of its answer; `interrupted` where sound was left to be played."""

    question: str
    transcript: str = ""
    audio_seconds: float = 0.0
    user_transcript: str = ""
    interrupted: bool = False
    ended: bool = False


@asynccontextmanager
async def beside(*tasks: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block until its end; what one of them raises is raised."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(task) for task in tasks]
        yield
        for task in running:
            task.cancel()


@dataclass
class Conversation:
    """What a judge reports. The client's events call `began` to `failed`."""

    client: str
    version: str
    turns: list[Turn] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    history: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loudspeaker = Loudspeaker()
        self._answering: Turn | None = None

    def began(self) -> None:
        """An answer begins: to the last question."""
        self._answering = self.turns[-1] if self.turns else None

    def sounded(self, seconds: float, played: bool = False) -> None:
        """Sound of the answer arrived; `played` where the client has a loudspeaker of its own."""
        if self._answering:
            self._answering.audio_seconds += seconds
        if not played:
            self.loudspeaker.play(seconds)

    def wrote(self, text: str) -> None:
        if self._answering:
            self._answering.transcript += text

    def ended(self) -> None:
        if self._answering:
            self._answering.ended = True

    def stopped(self) -> None:
        """The loudspeaker is to stop, whether it plays or not."""
        if self.loudspeaker.stop():
            self.interrupted()

    def interrupted(self) -> None:
        """The answer was cut off."""
        if self._answering:
            self._answering.interrupted = True

    def understood(self, text: str) -> None:
        """What was understood of the first question of which nothing is known yet."""
        unknown = (turn for turn in self.turns if not turn.user_transcript)
        next(unknown, self.turns[-1]).user_transcript += text

    def failed(self, what: object) -> None:
        if str(what) not in self.errors:
            self.errors.append(str(what))

    async def hold(self, say: Callable[[bytes], Awaitable[None]], files: list[Path]) -> None:
        """Ask every question; the last but one interrupts the answer before it."""
        for number, file in enumerate(files):
            await self._hear(Turn(file.name), say(read(file)), whole=number != len(files) - 3)

    async def write(self, asking: Awaitable[None]) -> None:
        """Ask what is WRITTEN, and hear the answer out."""
        await self._hear(Turn(WRITTEN, user_transcript=WRITTEN), asking, whole=True)

    async def _hear(self, turn: Turn, asking: Awaitable[None], whole: bool) -> None:
        self.turns.append(turn)
        await asking
        sounds = await self._until(lambda: turn.audio_seconds > 0, f"no answer to {turn.question}")
        if sounds and whole:
            await self._until(lambda: turn.ended and not self.loudspeaker.left(), f"no end of the answer to {turn.question}")
        await asyncio.sleep(PAUSE if whole else HEARD)

    async def _until(self, true: Callable[[], bool], complaint: str) -> bool:
        late = time.monotonic() + BEGIN
        while not true():
            if time.monotonic() > late:
                self.failed(complaint)
                return False
            await asyncio.sleep(0.01)
        return True

    def report(self) -> str:
        turns = [{key: value for key, value in asdict(turn).items() if key != "ended"} for turn in self.turns]
        for turn in turns:
            turn["audio_seconds"] = round(turn["audio_seconds"], 3)
        whole = {"client": self.client, "version": self.version, "turns": turns, "errors": self.errors, "history": self.history}
        return json.dumps(whole, ensure_ascii=False, indent=1)


Converse = Callable[[Conversation, argparse.Namespace], Awaitable[None]]
"""What a judge does: it holds the conversation, called as its arguments say."""


class _Complaints(logging.Handler):
    """Takes what the client logs as an error, since some go on after it."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(logging.ERROR)
        self.conversation = conversation

    def emit(self, record: logging.LogRecord) -> None:
        self.conversation.failed(self.format(record))


def arguments(description: str) -> argparse.ArgumentParser:
    """What every judge is called with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("url", help="ws://127.0.0.1:PORT/v1")
    parser.add_argument("key")
    parser.add_argument("files", type=Path, nargs="+", help="WAV files, 24 kHz, mono, 16 bits; three at least")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which the conversation is given up")
    return parser


def judge(package: str, converse: Converse, options: argparse.Namespace) -> None:
    """Run a conversation within the limit, print its report, and exit."""
    conversation = Conversation(package, version(package))
    logging.getLogger().addHandler(_Complaints(conversation))
    code = 0
    try:
        asyncio.run(asyncio.wait_for(converse(conversation, options), options.limit))
    except Exception as error:
        traceback.print_exc()
        conversation.failed(repr(error))
        code = 1
    print(conversation.report())
    sys.exit(code)
