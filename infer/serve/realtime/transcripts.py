"""Transcripts of spoken items by the model itself (task A1T1), and of turns while somebody speaks, where there is time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from infer.pcm import PCM_RATE
from infer.serve.errors import as_protocol_error, broken
from infer.serve.realtime.dialogue import closed, opened
from infer.serve.realtime.items import ConversationItem
from infer.serve.realtime.protocol import Event, ProtocolError
from infer.serve.realtime.responses import Responses
from infer.serve.realtime.state import SessionState
from omni.errors import UserError
from omni.generate.results import Ended, TextDelta

AFTER = 1.0  # seconds for which a transcript waits for the first sound of the answer, which comes first
MOST = 512  # tokens of a transcript
EVERY = 0.6  # seconds between two of a turn at least
REST = 3.0  # how many times as long as the last one took nothing is understood at least: a long turn takes longer each time
CHARACTERS = 30  # characters of a second of speech at most; a model that writes more has lost its way, and nothing is told

WRITTEN, PARTIAL = "conversation.item.input_audio_transcription", "omni.input_audio_transcription.partial"
"""Beginning of the types of events of a transcript, and type of those of a turn that is not over."""


class Transcripts:
    """Writes down the items of one session, one after another, and its turn again and again until it is committed or dropped.

    For the latter one session of the engine is asked each time, which holds what it was asked before of the same sound.
    """

    def __init__(self, owner: SessionState, responses: Responses) -> None:
        self._owner, self._responses = owner, responses
        self._lock = asyncio.Lock()
        self._session: Any = None
        self._engine: Any = None
        self._task: asyncio.Task[None] | None = None
        self._due = self._asked = 0.0
        self._sent_text = ""

    async def write(self, item: ConversationItem) -> None:
        """Write an item down."""
        async with self._lock:
            if (response := self._responses.active) is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(response.first.wait(), AFTER)
            part, where = item.content[0], {"item_id": item.id, "content_index": 0}
            try:
                part.text = "" if part.silent else await self._text(part.sound, where)
            except (UserError, ProtocolError) as error:
                cause = as_protocol_error(error)
                failure = {"type": cause.error_type, "code": "transcription_failed", "message": str(cause)}
                self._owner.send({"type": f"{WRITTEN}.failed", **where, "error": failure})
                return
            usage = {"type": "duration", "seconds": round(item.seconds, 3)}
            self._owner.send({"type": f"{WRITTEN}.completed", **where, "transcript": part.text, "usage": usage})

    async def _text(self, sound: Any, where: Event) -> str:
        """The transcript; its pieces are sent as they come."""
        text, engine = "", self._owner.host.engine
        session = await opened(engine, max_tokens=MOST)
        try:
            async with session.ask(sound, "A1T1", sample_rate=PCM_RATE) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        text += event.text
                        self._owner.send({"type": f"{WRITTEN}.delta", **where, "delta": event.text})
                    elif isinstance(event, Ended) and event.reason == "error":
                        raise broken(event.error, engine)
        finally:
            await closed(session)
        return text.strip()

    # --- turns that are not over --------------------------------------------------------------------------------------

    def follow(self, item: str, first: float, last: float, question: Callable[[], Any]) -> None:
        """Transcribes a turn of seconds `first` to `last` of the input, for its future item, when the next transcript is due.
        `question` makes the question of the turn so far; None where there is nothing yet."""
        if self._task is None and last > self._asked and time.monotonic() >= self._due:
            self._due, self._asked = time.monotonic() + EVERY, last
            self._task = self._owner.spawn(self._follow(item, last - first, question))

    def stop(self) -> None:
        """The turn was committed or dropped: what is under way is cancelled, and nobody waits for it."""
        task, self._task, self._sent_text = self._task, None, ""
        self._due = time.monotonic() + EVERY
        if task is not None:
            task.cancel()

    async def _follow(self, item: str, seconds: float, question: Callable[[], Any]) -> None:
        start, session = time.monotonic(), None
        try:
            if not await asyncio.to_thread(self._owner.host.spare) or (asked := question()) is None:
                return
            session = await self._ready()
            text = await self._partial(session, asked, round(CHARACTERS * (seconds + 1)))
            if text and text != self._sent_text:
                self._sent_text = text
                self._owner.send({"type": PARTIAL, "item_id": item, "content_index": 0, "transcript": text})
            session = None
        except UserError:  # nothing was heard yet, or the engine was lost: the turn's own transcript says so
            pass
        finally:
            if self._task is asyncio.current_task():
                self._task = None
            self._due = max(self._due, time.monotonic() + REST * (time.monotonic() - start))
            if session is not None:  # its history is not known
                await self.close()

    async def _ready(self) -> Any:
        engine = self._owner.host.engine
        if self._session is None or self._engine is not engine:
            context = self._owner.settings.answering.context
            self._session, self._engine = await opened(engine, max_tokens=MOST, context=context), engine
        return self._session

    async def _partial(self, session: Any, question: Any, most: int) -> str:
        """The transcript, "" where it has more than `most` characters; the session forgets it."""
        text = ""
        async with session.ask(question, "A1T1", sample_rate=PCM_RATE) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    text += event.text
                if len(text) > most or (isinstance(event, Ended) and event.reason == "error"):
                    text = ""
                    break
            await asyncio.to_thread(session.withdraw, events.running)
        return text.strip()

    async def close(self) -> None:
        """Close the session that turns were asked in."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(UserError):
                await closed(session)
