"""`/v1/chat/completions`: questions in text and sound, answered in text or in text and sound, whole or as a stream."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Annotated, Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from torch import Tensor

from infer.serve.realtime.protocol import Event, ProtocolError, new_id
from infer.serve.rest.answers import TokenCounts, deltas, encoded, token_counts
from infer.serve.rest.jobs import Job, event_stream
from infer.serve.rest.messages import MOST_MESSAGES, Chat, ChatMessage, MessageReader, in_decoder
from omni.generate.options import Sampling
from omni.generate.question import longest
from omni.generate.results import Ended
from omni.generate.results import Event as Output

Tokens = Annotated[int, Field(ge=1, le=2**20)]
LEAST_TOP_P = 1e-6  # smallest `top_p` of a model; clients send 0 for it
SAMPLING = {"seed", *(field.name for field in fields(Sampling))}


class AudioOptions(BaseModel):
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] | None = None
    voice: Any = None


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """A request. What would change the answer and is not here (penalties, log probabilities, calls that are required) may only
    say so; other fields (tools, which a model need not call) are left alone."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1)] | None = None
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda value: max(value, LEAST_TOP_P))] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=1000)]],
            Field(max_length=16),
            BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    function_call: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[False] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def speaks(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def form(self) -> str:
        """Format of the answer's sound."""
        chosen = None if self.audio is None else self.audio.format
        return chosen or ("pcm16" if self.stream else "wav")


async def complete(job: Job) -> Response:
    """Answers a request."""
    body, server = await job.read(ChatRequest), job.server
    if body.speaks and not server.voices.speaks:
        raise ProtocolError("this model has no sound; leave modalities out", param="modalities")
    if body.speaks and body.stream and body.form != "pcm16":
        raise ProtocolError(f"audio.format is {body.form!r}; streams have pcm16", param="audio.format")
    reader = MessageReader(longest(server.host.engine.config), lambda answer_id: server.kept.find(answer_id, job.owner))
    chat = await in_decoder(reader.read, body.messages)
    server.keys.usage[job.owner].count(seconds=chat.seconds)
    completion = Completion(job, body, chat)
    question, task, options = completion.asked()
    if not body.stream:
        return JSONResponse(await completion.whole(*await job.whole(question, task, **options)))
    events = await job.begun(question, task, **options)
    return event_stream(job, completion.chunks(events), last="[DONE]")


class Completion:
    """One answer in the form of chat completions."""

    def __init__(self, job: Job, body: ChatRequest, chat: Chat) -> None:
        self._job, self._body, self._chat = job, body, chat
        self._id, self._created = new_id("chatcmpl"), int(time.time())
        self._rate: int = job.server.host.engine.sample_rate
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    def asked(self) -> tuple[str | Tensor, str, dict[str, Any]]:
        """The question, its task and keywords of its session."""
        body, chat, server = self._body, self._chat, self._job.server
        most = body.max_completion_tokens or body.max_tokens
        options = server.settings.answering.keywords(body.speaks, most, **body.model_dump(include=SAMPLING))
        options["stop"] = body.stop or None
        options["system"] = chat.system if server.settings.answering.use_instructions else ""
        if body.speaks and body.audio is not None:
            options["adapter"] = server.voices.adapter(body.audio.voice)
        task = f"{'A' if isinstance(chat.question, Tensor) else 'T'}1{'A' if body.speaks else 'T'}2"
        history = [message for turn in chat.before for message in turn.history()] or None
        return chat.question, task, {**options, "history": history, "overflow": "forget"}

    async def _settled(self, audio_id: str) -> tuple[Event, int]:
        """The usage of an answer that has ended, and when its sound expires, in seconds since 1970 (0 without sound)."""
        session = self._job.session
        usage = chat_usage(token_counts(await asyncio.to_thread(lambda: session.turns)))
        if not self._body.speaks:
            return usage, 0
        answer = await asyncio.to_thread(lambda: session.last_answer)
        return usage, self._job.server.kept.add(audio_id, self._job.owner, answer)

    async def whole(self, text: str, sound: Tensor, ended: Ended) -> Event:
        """The `chat.completion`."""
        audio_id = new_id("audio")
        usage, expires = await self._settled(audio_id)
        message: Event = {"role": "assistant", "content": text, "refusal": None}
        if self._body.speaks:
            data = base64.b64encode(await asyncio.to_thread(encoded, sound, self._rate, self._body.form)).decode()
            message["audio"] = {"id": audio_id, "data": data, "expires_at": expires, "transcript": text}
            message["content"] = None
        choice = {"index": 0, "message": message, "finish_reason": _finish(ended), "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage}

    async def chunks(self, events: AsyncIterator[Output]) -> AsyncIterator[Event]:
        """The `chat.completion.chunk`s."""
        audio_id, speaks = new_id("audio"), self._body.speaks
        yield self._chunk({"role": "assistant", "refusal": None} if speaks else {"role": "assistant", "content": ""})
        finish = "stop"
        async for piece in deltas(events, self._rate):
            if isinstance(piece, bytes):
                yield self._chunk({"audio": {"id": audio_id, "data": base64.b64encode(piece).decode()}})
            elif isinstance(piece, Ended):
                finish = _finish(piece)
            else:
                yield self._chunk({"audio": {"id": audio_id, "transcript": piece}} if speaks else {"content": piece})
        usage, expires = await self._settled(audio_id)
        if speaks:
            yield self._chunk({"audio": {"expires_at": expires}})
        yield self._chunk({}, finish)
        if self._with_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, object_type: str) -> Event:
        return {"id": self._id, "object": object_type, "created": self._created, "model": self._job.server.voices.model}

    def _chunk(self, delta: Event, finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        usage = {"usage": None} if self._with_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}


def _finish(ended: Ended) -> str:
    """`finish_reason` of an answer that did not break."""
    return "length" if ended.reason in ("length", "cache") else "stop"


def chat_usage(tokens: TokenCounts) -> Event:
    """The `usage` of chat completions."""
    read, written = tokens.read_text + tokens.read_audio, tokens.written_text + tokens.written_audio
    details = {"text_tokens": tokens.written_text, "audio_tokens": tokens.written_audio, "reasoning_tokens": 0}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"text_tokens": tokens.read_text, "audio_tokens": tokens.read_audio, "cached_tokens": 0},
        "completion_tokens_details": details,
    }
