"""`/v1/audio/speech`: a text, spoken (task T1A1), as a file or as it is made."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import BaseModel, Field

from infer.serve.realtime.protocol import Event, ProtocolError
from infer.serve.rest.answers import begun, used, whole
from infer.serve.rest.formats import MEDIA, encoded, joined, raw, wav_header
from infer.serve.rest.jobs import Job, StreamedResponse, event_stream
from omni.generate.results import Event as Output

TASK = "T1A1"

LONGEST_INPUT = 4096
"""Characters of a text, as OpenAI limits it."""


class SpeechRequest(BaseModel):
    """A request; fields that change nothing here (the model's name, instructions) are left alone.

    Attributes:
        speed: the model has one.
    """

    input: Annotated[str, Field(min_length=1, max_length=LONGEST_INPUT)]
    voice: Any = None
    response_format: Literal["mp3", "wav", "flac", "opus", "pcm"] | None = None
    speed: Annotated[float, Field(ge=1, le=1)] | None = None
    stream_format: Literal["sse", "audio"] | None = None

    @property
    def form(self) -> str:
        return self.response_format or "mp3"


async def speak(job: Job) -> Response:
    """Answers a request: `pcm` and `wav` as the sound is made, other formats when it is whole."""
    body = await job.read(SpeechRequest)
    if not job.server.voices.speaks:
        raise ProtocolError("this model has no sound", "model_not_supported")
    if body.form not in ("pcm", "wav"):
        data = await job.while_connected(_file(job, body))
        if body.stream_format == "sse":
            return event_stream(job, _events(job, _one(data)))
        return Response(data, media_type=MEDIA[body.form])
    rate: int = job.server.host.engine.sample_rate
    events = await job.while_connected(_begun(job, body))
    pieces = _grown(raw(events, rate), body.form)
    return (
        event_stream(job, _events(job, pieces))
        if body.stream_format == "sse"
        else StreamedResponse(job, pieces, MEDIA[body.form])
    )


async def _ask(job: Job, body: SpeechRequest, pace: Any) -> Any:
    server = job.server
    options = server.settings.answering.keywords()
    return await job.ask(body.input, TASK, pace, adapter=server.voices.adapter(body.voice), **options)


async def _begun(job: Job, body: SpeechRequest) -> AsyncIterator[Output]:
    return await begun(await _ask(job, body, "read"))


async def _file(job: Job, body: SpeechRequest) -> bytes:
    rate: int = job.server.host.engine.sample_rate
    found = await whole(await _ask(job, body, "whole"))
    return await asyncio.to_thread(lambda: encoded(joined(found.chunks, rate), body.form))


async def _grown(samples: AsyncIterator[bytes], form: str) -> AsyncIterator[bytes]:
    """A file that grows: the samples, after a header where the format has one."""
    if form == "wav":
        yield wav_header()
    async for piece in samples:
        yield piece


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _events(job: Job, pieces: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Pieces of sound as events."""
    async for piece in pieces:
        yield {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
    session = job.session
    found = used(await asyncio.to_thread(lambda: session.turns))
    usage = {"input_tokens": found.read, "output_tokens": found.written, "total_tokens": found.read + found.written}
    yield {"type": "speech.audio.done", "usage": usage}
