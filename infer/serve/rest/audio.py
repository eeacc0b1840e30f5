"""`/v1/audio/speech`, a text spoken (task T1A1), and `/v1/audio/transcriptions`, what a sound file says (A1T1)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, BeforeValidator, Field
from starlette.datastructures import FormData, UploadFile
from torch import Tensor
from torch.nn.functional import pad

from infer.pcm import PCM_RATE, to_int16
from infer.serve.realtime.hearing import TRANSCRIPT_TOKENS
from infer.serve.realtime.protocol import Event, ProtocolError
from infer.serve.rest.answers import MEDIA, begun, deltas, encoded, token_counts
from infer.serve.rest.jobs import Job, StreamedResponse, event_stream, validated
from infer.serve.rest.messages import decoded, in_decoder
from infer.turns.vad import SpeechStream
from omni.audio.io import SAMPLE_RATE
from omni.audio.resample import resample
from omni.audio.wav import wav_header
from omni.generate.question import longest
from omni.generate.results import Event as Output
from omni.generate.results import TextDelta

LONGEST_INPUT = 4096  # characters of a text, as OpenAI limits it
TIMED = ("srt", "vtt", "diarized_json")  # formats that tell who speaks when, which the model does not know

UNKNOWN = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
"""Fields that ask for that, or for log probabilities."""

SPEECH = 0.25  # probability of speech that the likeliest 32 ms of a sound have at least, or nothing is said in it


SILENT = "the model made no sound of this text in this voice; take another voice or text"


class SpeechRequest(BaseModel):
    """A request; fields that change nothing here (the model's name, instructions) are left alone. The model has one speed."""

    input: Annotated[str, Field(min_length=1, max_length=LONGEST_INPUT)]
    voice: Any = None
    response_format: Annotated[
        Literal["mp3", "wav", "flac", "opus", "pcm"], BeforeValidator(lambda value: "mp3" if value is None else value)
    ] = "mp3"
    speed: Annotated[float, Field(ge=1, le=1)] | None = None
    stream_format: Literal["sse", "audio"] | None = None


async def speak(job: Job) -> Response:
    """Answers a request: `pcm` and `wav` as the sound is made, other formats when it is whole."""
    body = await job.read(SpeechRequest)
    form = body.response_format
    if not job.server.voices.speaks:
        raise ProtocolError("this model has no sound", "model_not_supported")
    rate: int = job.server.host.engine.sample_rate
    options = job.server.settings.answering.keywords(speaks=True)
    options["adapter"] = job.server.voices.adapter(body.voice)
    if form not in ("pcm", "wav"):
        _, sound, _ = await job.whole(body.input, "T1A1", **options)
        if not len(sound):
            raise ProtocolError(SILENT, "no_sound", status=500)
        data = await asyncio.to_thread(encoded, sound, rate, form)
        if body.stream_format == "sse":
            return event_stream(job, _events(job, _one(data)))
        return Response(data, media_type=MEDIA[form])
    events = await job.begun(body.input, "T1A1", **options)
    chunks = (piece async for piece in deltas(events, rate) if isinstance(piece, bytes))
    head = [wav_header(PCM_RATE)] if form == "wav" else []
    pieces = await job.while_connected(begun(chunks, head, ProtocolError(SILENT, "no_sound", status=500)))
    if body.stream_format == "sse":
        return event_stream(job, _events(job, pieces))
    return StreamedResponse(job, pieces, MEDIA[form])


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _events(job: Job, pieces: AsyncIterator[bytes]) -> AsyncIterator[Event]:
    """Pieces of sound as events."""
    async for piece in pieces:
        yield {"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()}
    session = job.session
    tokens = token_counts(await asyncio.to_thread(lambda: session.turns))
    read, written = tokens.read_text + tokens.read_audio, tokens.written_text + tokens.written_audio
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    yield {"type": "speech.audio.done", "usage": usage}


class TranscriptionRequest(BaseModel):
    """Fields of the form besides the file; those that change nothing here (model, prompt, chunking) are left alone, and the
    language is given back in `verbose_json`."""

    response_format: Literal["json", "text", "verbose_json"] = "json"
    language: Annotated[str, Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.0
    stream: bool = False


async def transcribe(job: Job) -> Response:
    """Answers a request."""
    async with job.form() as form:
        body, file = read_fields(form), form.get("file")
        if not isinstance(file, UploadFile):
            problem = "file is missing; send the sound as a file of multipart/form-data"
            raise ProtocolError(problem, "missing_required_parameter", "file")
        data = await file.read()
    limit = longest(job.server.host.engine.config)
    clip = await in_decoder(decoded, data, limit, "file")
    seconds = len(clip) / SAMPLE_RATE
    job.server.keys.usage[job.owner].count(seconds=seconds)
    usage = {"type": "duration", "seconds": round(seconds, 3)}
    spoken = await job.while_connected(_has_speech(job, clip))
    options = {"max_tokens": TRANSCRIPT_TOKENS, "temperature": body.temperature}
    if body.stream:
        events = await job.begun(clip, "A1T1", **options) if spoken else None
        return event_stream(job, _deltas(events, usage))
    text = (await job.whole(clip, "A1T1", **options))[0].strip() if spoken else ""
    if body.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if body.response_format == "json":
        return JSONResponse({"text": text, "usage": usage})
    language = body.language or "unknown"
    reply = {"task": "transcribe", "language": language, "duration": round(seconds, 3), "text": text, "usage": usage}
    return JSONResponse(reply)


def read_fields(form: FormData) -> TranscriptionRequest:
    """The fields of a form; ProtocolError names one with a bad value."""
    fields: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str) and value}
    if fields.get("response_format") in TIMED:
        message = f"response_format {fields['response_format']!r} tells times, which this model does not know; use json"
        raise ProtocolError(message, "unsupported_value", "response_format")
    for name in fields:
        if name.removesuffix("[]") in UNKNOWN:
            message = f"{name} asks for times, speakers or log probabilities, which this model does not know; leave it out"
            raise ProtocolError(message, "unsupported_value", name)
    return validated(TranscriptionRequest, fields)


async def _has_speech(job: Job, clip: Tensor) -> bool:
    """Whether voice activity finds speech in samples [S] at 16 kHz; a second at a time, between those of live sessions."""
    stream, padded = SpeechStream(), pad(clip, (0, SAMPLE_RATE // 2))
    sound = to_int16((await in_decoder(resample, padded, SAMPLE_RATE, PCM_RATE)).numpy())
    for second in np.split(sound, range(PCM_RATE, len(sound), PCM_RATE)):
        if max(await job.server.vad.push(stream, second), default=0.0) >= SPEECH:
            return True
    return False


async def _deltas(events: AsyncIterator[Output] | None, usage: Event) -> AsyncIterator[Event]:
    text = ""
    if events is not None:
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
                yield {"type": "transcript.text.delta", "delta": event.text}
    yield {"type": "transcript.text.done", "text": text.strip(), "usage": usage}
