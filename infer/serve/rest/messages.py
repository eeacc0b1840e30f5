"""Messages of chat completions as turns: questions, and the answers that they have.

Sound is decoded here. Nothing that a message names is ever fetched: sound comes in the request, or as the id of an earlier
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from infer.serve.realtime.configuration import LONGEST_TEXT
from infer.serve.realtime.items import from_base64
from infer.serve.realtime.protocol import ProtocolError, json_type, shown
from omni.audio.io import SAMPLE_RATE, opened
from omni.audio.waveform import read_sound
from omni.errors import UserError
from omni.generate.messages import Message

MOST_MESSAGES = 4096

MOST_SECONDS = 600.0  # seconds of sound of all messages together; one question's may be less, as the model says
MOST_CHANNELS, MOST_RATE = 2, 192_000  # of a sound file

_DECODERS = ThreadPoolExecutor(2, "decode")
T = TypeVar("T")

SHORTEST = 0.1  # seconds of a sound at least, as OpenAI's: what is shorter is answered with anything at all

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class ChatTurn:
    """A question, as a text or as samples [S] at 16 kHz, and its answer: one of the engine's, a client's text, or none."""

    question: str | Tensor
    answer: Message | str | None = None

    @property
    def spoken(self) -> bool:
        return isinstance(self.question, Tensor)

    def history(self) -> list[Any]:
        """The turn for a session's history; a question without an answer was interrupted before any of it was heard.

        A spoken answer has the task that fits its question here, whatever it answered first: a text is never read as a file.
        """
        answer: Any = {"role": "assistant", "content": self.answer}
        if not isinstance(self.answer, str):
            message = self.answer or Message("assistant", "", cut=True)
            answer = replace(message, task="A1A2" if self.spoken else "T1A2")
        return [{"role": "user", "content": self.question}, answer]


@dataclass(frozen=True)
class Chat:
    """The content of a request: earlier turns, the question, the texts of system messages, and the seconds of all sound."""

    before: Sequence[ChatTurn]
    question: str | Tensor
    system: str
    seconds: float

    @property
    def spoken(self) -> bool:
        return isinstance(self.question, Tensor)

    def history(self) -> list[Any] | None:
        return [message for turn in self.before for message in turn.history()] or None


class MessageReader:
    """Reads the messages of one request, whose questions last at most `longest` seconds; `find` finds kept answers by their
    ids."""

    def __init__(self, longest: float, find: Callable[[str], Message | None]) -> None:
        self._longest, self._find = longest, find
        self._turns: list[ChatTurn] = []
        self._system: list[str] = []
        self._characters, self._seconds = 0, 0.0
        self._empty = self._mixed = ""  # field of the user's last message where it is empty, or has text and sound

    def read(self, messages: Sequence[Any]) -> Chat:
        """Reads all messages, and decodes their sound (call it in a thread). Each sound, and the text of each message, is a
        turn; answers without a question, and messages of tools, are skipped. ProtocolError names the field that is wrong."""
        for number, message in enumerate(messages):
            self._message(message, f"messages.{number}")
        if not self._turns or self._turns[-1].answer is not None:
            if self._empty:
                raise ProtocolError(f"{self._empty} is empty; send a question", param=self._empty)
            raise ProtocolError("the last message that is no tool's must be the user's question", param="messages")
        if self._mixed:
            raise ProtocolError(f"{self._mixed} has text and sound; a question is either text or sound", param=self._mixed)
        return Chat(self._turns[:-1], self._turns[-1].question, "\n".join(self._system), self._seconds)

    def _message(self, message: Any, param: str) -> None:
        if not isinstance(message, dict):
            raise ProtocolError(f"{param} is {json_type(message)}; send an object", param=param)
        role = _named(message, "role", param, f"use one of {', '.join(ROLES)}", ROLES)
        content = message.get("content")
        if role in ("user", "assistant"):
            self._empty = self._mixed = ""
        if role == "user":
            parts = self._parts(content, param, sounds=True)
            self._empty = "" if parts else f"{param}.content"
            self._mixed = f"{param}.content" if len({isinstance(part, str) for part in parts}) > 1 else ""
            self._turns += [ChatTurn(part) for part in parts]
        elif role in ("system", "developer"):
            self._system += self._parts(content, param)
        elif role == "assistant":
            answer: Message | str | None = self._kept(message["audio"], param) if message.get("audio") else None
            if answer is None and content is not None:
                answer = "".join(self._parts(content, param))
            if answer is not None and self._turns and self._turns[-1].answer is None:
                self._turns[-1] = replace(self._turns[-1], answer=answer)

    def _kept(self, audio: Any, param: str) -> Message:
        param += ".audio.id"
        answer_id = audio.get("id") if isinstance(audio, dict) else None
        if not isinstance(answer_id, str):
            raise ProtocolError(f"{param} must be the id of an answer's sound", param=param)
        answer = self._find(answer_id)
        if answer is None:
            raise ProtocolError(f"audio not found: {answer_id[:80]!r} is unknown, or expired", "audio_not_found", param)
        return answer

    def _parts(self, content: Any, param: str, sounds: bool = False) -> list[Any]:
        """Texts and sounds of a message, in their order; texts that follow each other are one, and blank ones are left out."""
        param += ".content"
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise ProtocolError(
                f"{param} must be a text, or a list of parts",
                "missing_required_parameter" if content is None else "invalid_value",
                param,
            )
        contents: list[Any] = []
        for number, part in enumerate(content):
            part_param = f"{param}.{number}"
            if not isinstance(part, dict):
                raise ProtocolError(f"{part_param} is {json_type(part)}; send an object", param=part_param)
            types = ("text", "input_audio") if sounds else ("text",)
            part_type = _named(part, "type", part_param, f"this model takes {' and '.join(types)} here", types)
            if part_type == "text":
                text = self._text(part.get("text"), f"{part_param}.text")
                if contents and isinstance(contents[-1], str):
                    contents[-1] += f"\n{text}"
                else:
                    contents.append(text)
            else:
                contents.append(self._sound(part.get("input_audio"), f"{part_param}.input_audio"))
        return [part for part in contents if not isinstance(part, str) or part.strip()]

    def _text(self, text: Any, param: str) -> str:
        if not isinstance(text, str):
            raise ProtocolError(f"{param} must be a text", param=param)
        self._characters += len(text)
        if self._characters > LONGEST_TEXT:
            message = f"the messages have more than {LONGEST_TEXT:,} characters; leave the oldest out"
            raise ProtocolError(message, "context_length_exceeded", "messages")
        return text

    def _sound(self, audio: Any, param: str) -> Tensor:
        data = from_base64(audio.get("data") if isinstance(audio, dict) else None, f"{param}.data")
        clip = decoded(data, min(self._longest, MOST_SECONDS), f"{param}.data")
        self._seconds += len(clip) / SAMPLE_RATE
        if self._seconds > MOST_SECONDS:
            message = f"the messages have more than {MOST_SECONDS:g} s of sound; leave the oldest out"
            raise ProtocolError(message, "context_length_exceeded", "messages")
        return clip


def _named(values: dict[str, Any], name: str, param: str, way: str, known: Sequence[str]) -> str:
    """A name of an object, one of those that are known."""
    param, value = f"{param}.{name}", values.get(name)
    if isinstance(value, str) and value in known:
        return value
    if name not in values:
        raise ProtocolError(f"{param} is missing; {way}", "missing_required_parameter", param)
    raise ProtocolError(f"{param} is {shown(value)}; {way}", param=param)


async def in_decoder(work: Callable[..., T], *arguments: Any) -> T:
    """Runs a function that decodes sound in one of two threads for all requests, which bounds the memory of decoding."""
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, work, *arguments)


def decoded(data: bytes, longest: float, param: str) -> Tensor:
    """Samples [S] at 16 kHz of a sound file's bytes; ProtocolError where the file is unreadable or cut,
    or has too many channels, too high a rate, or less than `SHORTEST` or more than `longest` seconds."""
    if not data:
        raise ProtocolError(f"{param} is empty; send a sound file", "invalid_audio", param)
    try:
        with opened(data, f"sound of {len(data)} bytes") as recording:
            rate, channels = recording.rate, recording.channels
        if channels > MOST_CHANNELS:
            raise ProtocolError(f"{param} has {channels} channels; send mono or stereo", "invalid_audio", param)
        if rate > MOST_RATE:
            raise ProtocolError(f"{param} has {rate:,} Hz; send at most {MOST_RATE:,}", "invalid_audio", param)
        clip = read_sound(data, SAMPLE_RATE, max_seconds=longest)
    except UserError as error:
        raise ProtocolError(f"{param}: {error}", "invalid_audio", param) from None
    if len(clip) < SHORTEST * SAMPLE_RATE:
        seconds = len(clip) / SAMPLE_RATE
        raise ProtocolError(
            f"{param} is too short: {seconds:.3g} s of sound; send {SHORTEST:g} s or more", "audio_too_short", param
        )
    return clip
