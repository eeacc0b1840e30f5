"""Transcripts of spoken items by the model itself (task A1T1), beside the conversation."""

from __future__ import annotations

import asyncio
import contextlib

from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import PCM_RATE
from infer.serve.realtime.dialogue import closed, opened
from infer.serve.realtime.failures import broken, told_of
from infer.serve.realtime.items import ConversationItem
from infer.serve.realtime.owner import Owner
from infer.serve.realtime.protocol import ProtocolError
from infer.serve.realtime.responses import Responses
from omni.errors import UserError
from omni.generate.results import Ended, TextDelta

AFTER = 1.0
"""Seconds for which a transcript waits for the first sound of the answer, which comes first."""

MOST = 512
"""Tokens of a transcript."""


class Transcripts:
    """Writes down the items of one session, one after another."""

    def __init__(self, owner: Owner, responses: Responses, host: EngineHost) -> None:
        self._owner, self._responses, self._host = owner, responses, host
        self._turn = asyncio.Lock()

    def add(self, item: ConversationItem) -> None:
        """Have an item written down."""
        self._owner.spawn(self._write(item))

    async def _write(self, item: ConversationItem) -> None:
        async with self._turn:
            response = self._responses.active
            if response is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(response.first.wait(), AFTER)
            name = "conversation.item.input_audio_transcription"
            where = {"item_id": item.id, "content_index": 0}
            try:
                item.content[0].text = "" if item.content[0].silent else await self._text(item, name, where)
            except (UserError, ProtocolError) as error:
                found = told_of(error)
                failure = {"type": found.kind, "code": "transcription_failed", "message": str(found)}
                self._owner.send({"type": f"{name}.failed", **where, "error": failure})
                return
            usage = {"type": "duration", "seconds": round(item.seconds, 3)}
            self._owner.send({"type": f"{name}.completed", **where, "transcript": item.content[0].text, "usage": usage})

    async def _text(self, item: ConversationItem, name: str, where: dict[str, object]) -> str:
        """The transcript; its pieces are sent as they come."""
        sound, engine = item.content[0].sound, self._host.engine
        text = ""
        session = await opened(engine, max_tokens=MOST)
        try:
            async with session.ask(sound, "A1T1", sample_rate=PCM_RATE) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        text += event.text
                        self._owner.send({"type": f"{name}.delta", **where, "delta": event.text})
                    elif isinstance(event, Ended) and event.reason == "error":
                        raise broken(event.error, engine)
        finally:
            await closed(session)
        return text.strip()
