"""Transcripts of spoken items by the model itself (task A1T1), beside the conversation."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from infer.serve.host import EngineHost
from infer.serve.realtime.configuration import PCM_RATE
from infer.serve.realtime.items import Item
from omni.errors import UserError
from omni.generate.results import Ended, TextDelta

if TYPE_CHECKING:
    from infer.serve.realtime.session import RealtimeSession

AFTER = 1.0
"""Seconds for which a transcript waits for the first sound of the answer, which comes first."""

MOST = 512
"""Tokens of a transcript."""


class Transcripts:
    """Writes down the items of one session, one after another."""

    def __init__(self, session: RealtimeSession, host: EngineHost) -> None:
        self._session, self._host = session, host
        self._turn = asyncio.Lock()

    def add(self, item: Item) -> None:
        """Have an item written down."""
        self._session.spawn(self._write(item))

    async def _write(self, item: Item) -> None:
        async with self._turn:
            response = self._session.active
            if response is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(response.first.wait(), AFTER)
            name = "conversation.item.input_audio_transcription"
            where = {"item_id": item.id, "content_index": 0}
            try:
                item.content[0].text = await self._text(item, name, where)
            except UserError as error:
                told = {"type": "server_error", "code": "transcription_failed", "message": str(error)}
                self._session.send({"type": f"{name}.failed", **where, "error": told})
                return
            usage = {"type": "duration", "seconds": round(item.seconds, 3)}
            self._session.send({"type": f"{name}.completed", **where, "transcript": item.content[0].text, "usage": usage})

    async def _text(self, item: Item, name: str, where: dict[str, object]) -> str:
        """The transcript; its pieces are sent as they come."""
        sound, engine = item.content[0].sound, self._host.engine
        text = ""
        session = await asyncio.to_thread(lambda: engine.session(max_tokens=MOST))
        try:
            async with session.ask_async(sound, "A1T1", sample_rate=PCM_RATE) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        text += event.text
                        self._session.send({"type": f"{name}.delta", **where, "delta": event.text})
                    elif isinstance(event, Ended) and event.reason == "error":
                        raise UserError(event.error or "the transcript broke")
        finally:
            await asyncio.to_thread(session.close)
        return text.strip()
