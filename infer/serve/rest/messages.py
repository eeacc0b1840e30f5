"""Messages of chat completions as turns: questions, and the answers that they have.

Sound is decoded here. Nothing that a message names is ever fetched: sound comes in the request, or as the id of an earlier
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor

from infer.serve.realtime.configuration import LONGEST_TEXT
from infer.serve.realtime.protocol import ProtocolError
from infer.serve.realtime.state import from_base64
from omni.audio.io import SAMPLE_RATE, opened
from omni.audio.waveform import read_sound
from omni.errors import UserError
from omni.generate.history import Message

MOST_MESSAGES = 4096

MOST_SECONDS = 600.0  # seconds of sound of all messages together; one question's may be less, as the model says
MOST_CHANNELS, MOST_RATE = 2, 192_000  # of a sound file

_DECODERS = ThreadPoolExecutor(2, "decode")
T = TypeVar("T")

SHORTEST = 0.1  # seconds of a sound at least, as OpenAI's: what is shorter is answered with anything at all


@dataclass(frozen=True)
class ChatTurn:
    """A question, as a text or as samples [S] at 16 kHz, and its answer: one of the engine's, a client's text, or none."""

    question: str | Tensor
    answer: Message | str | None = None

    def history(self) -> list[Any]:
        """The turn for a session's history; a question without an answer was interrupted before any of it was heard.

        A spoken answer has the task that fits its question here, whatever it answered first: a text is never read as a file.
        """
        answer: Any = {"role": "assistant", "content": self.answer}
        if not isinstance(self.answer, str):
            message = self.answer or Message("assistant", "", cut=True)
            answer = replace(message, task="A1A2" if isinstance(self.question, Tensor) else "T1A2")
        return [{"role": "user", "content": self.question}, answer]


@dataclass(frozen=True)
class Chat:
    """The content of a request: earlier turns, the question, the texts of system messages, and the seconds of all sound."""

    before: Sequence[ChatTurn]
    question: str | Tensor
    system: str
    seconds: float


class AudioData(BaseModel):
    data: Any = None


class AnswerId(BaseModel):
    id: str


class Part(BaseModel):
    type: Literal["text", "input_audio"]
    text: str = ""
    input_audio: AudioData = AudioData()


Content = Annotated[
    list[Part],
    Field(min_length=1),
    BeforeValidator(lambda content: [{"type": "text", "text": content}] if isinstance(content, str) else content),
]


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    audio: AnswerId | None = None


class MessageReader:
    """Reads the messages of one request, whose questions last at most `longest` seconds; `find` finds kept answers by their
    ids."""

    def __init__(self, longest: float, find: Callable[[str], Message | None]) -> None:
        self._longest, self._find = longest, find
        self._turns: list[ChatTurn] = []
        self._system: list[str] = []
        self._characters, self._seconds = 0, 0.0
        self._empty = self._mixed = ""  # field of the user's last message where it is empty, or has text and sound

    def read(self, messages: Sequence[ChatMessage]) -> Chat:
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

    def _message(self, message: ChatMessage, param: str) -> None:
        if message.role in ("tool", "function"):
            return
        if message.role in ("system", "developer"):
            self._system += self._contents(message, param)
            return
        self._empty = self._mixed = ""
        if message.role == "user":
            contents = self._contents(message, param)
            self._empty = "" if contents else f"{param}.content"
            self._mixed = f"{param}.content" if len({isinstance(content, str) for content in contents}) > 1 else ""
            self._turns += [ChatTurn(content) for content in contents]
            return
        answer: Message | str | None = None
        if message.audio is not None and (answer := self._find(message.audio.id)) is None:
            problem = f"audio not found: {message.audio.id[:80]!r} is unknown, or expired"
            raise ProtocolError(problem, "audio_not_found", f"{param}.audio.id")
        if answer is None and message.content is not None:
            answer = "".join(self._contents(message, param))
        if answer is not None and self._turns and self._turns[-1].answer is None:
            self._turns[-1] = replace(self._turns[-1], answer=answer)

    def _contents(self, message: ChatMessage, param: str) -> list[Any]:
        """Texts and sounds of a message, in their order; texts that follow each other are one, and blank ones are left out."""
        param += ".content"
        if message.content is None:
            raise ProtocolError(f"{param} is missing; send a text, or a list of parts", "missing_required_parameter", param)
        contents: list[Any] = []
        for number, part in enumerate(message.content):
            if part.type == "input_audio" and message.role != "user":
                problem = f"{param}.{number}.type is 'input_audio'; this model takes text here"
                raise ProtocolError(problem, param=f"{param}.{number}.type")
            if part.type == "input_audio":
                contents.append(self._sound(part.input_audio.data, f"{param}.{number}.input_audio.data"))
                continue
            self._characters += len(part.text)
            if self._characters > LONGEST_TEXT:
                problem = f"the messages have more than {LONGEST_TEXT:,} characters; leave the oldest out"
                raise ProtocolError(problem, "context_length_exceeded", "messages")
            if contents and isinstance(contents[-1], str):
                contents[-1] += f"\n{part.text}"
            else:
                contents.append(part.text)
        return [content for content in contents if not isinstance(content, str) or content.strip()]

    def _sound(self, data: Any, param: str) -> Tensor:
        clip = decoded(from_base64(data, param), min(self._longest, MOST_SECONDS), param)
        self._seconds += len(clip) / SAMPLE_RATE
        if self._seconds > MOST_SECONDS:
            problem = f"the messages have more than {MOST_SECONDS:g} s of sound; leave the oldest out"
            raise ProtocolError(problem, "context_length_exceeded", "messages")
        return clip


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
