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
from infer.serve.realtime.protocol import ProtocolError, kind_of, shown
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
            given = self.answer or Message("assistant", "", cut=True)
            answer = replace(given, task="A1A2" if self.spoken else "T1A2")
        return [{"role": "user", "content": self.question}, answer]


@dataclass(frozen=True)
class Chat:
    """What messages say: the turns before, what is to be answered, texts of system messages, and the seconds of all sound."""

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
        self._empty = self._mixed = ""  # place of the user's last message where it has nothing, or text and sound

    def read(self, messages: Sequence[Any]) -> Chat:
        """What the messages say. Each sound, and the text of each message, is a turn; answers without a question, and messages
        of tools, are left out. It decodes sound: a thread should do it. ProtocolError with the place of what cannot be read."""
        for number, given in enumerate(messages):
            self._message(given, f"messages.{number}")
        if not self._turns or self._turns[-1].answer is not None:
            if self._empty:
                raise ProtocolError(f"{self._empty} is empty; send a question", param=self._empty)
            raise ProtocolError("the last message that is no tool's must be the user's question", param="messages")
        if self._mixed:
            raise ProtocolError(f"{self._mixed} has text and sound; a question is either text or sound", param=self._mixed)
        return Chat(self._turns[:-1], self._turns[-1].question, "\n".join(self._system), self._seconds)

    def _message(self, given: Any, place: str) -> None:
        if not isinstance(given, dict):
            raise ProtocolError(f"{place} is {kind_of(given)}; send an object", param=place)
        role = _named(given, "role", place, f"use one of {', '.join(ROLES)}", ROLES)
        content = given.get("content")
        if role in ("user", "assistant"):
            self._empty = self._mixed = ""
        if role == "user":
            parts = self._parts(content, place, sounds=True)
            self._empty = "" if parts else f"{place}.content"
            self._mixed = f"{place}.content" if len({isinstance(part, str) for part in parts}) > 1 else ""
            self._turns += [ChatTurn(part) for part in parts]
        elif role in ("system", "developer"):
            self._system += self._parts(content, place)
        elif role == "assistant":
            answer: Message | str | None = self._kept(given["audio"], place) if given.get("audio") else None
            if answer is None and content is not None:
                answer = "".join(self._parts(content, place))
            if answer is not None and self._turns and self._turns[-1].answer is None:
                self._turns[-1] = replace(self._turns[-1], answer=answer)

    def _kept(self, given: Any, place: str) -> Message:
        place += ".audio.id"
        answer_id = given.get("id") if isinstance(given, dict) else None
        if not isinstance(answer_id, str):
            raise ProtocolError(f"{place} must be the id of an answer's sound", param=place)
        answer = self._find(answer_id)
        if answer is None:
            raise ProtocolError(f"audio not found: {answer_id[:80]!r} is unknown, or expired", "audio_not_found", place)
        return answer

    def _parts(self, content: Any, place: str, sounds: bool = False) -> list[Any]:
        """Texts and sounds of a message, in their order; texts that follow each other are one, and blank ones are left out."""
        place += ".content"
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content:
            raise ProtocolError(
                f"{place} must be a text, or a list of parts",
                "missing_required_parameter" if content is None else "invalid_value",
                place,
            )
        found: list[Any] = []
        for number, part in enumerate(content):
            at = f"{place}.{number}"
            if not isinstance(part, dict):
                raise ProtocolError(f"{at} is {kind_of(part)}; send an object", param=at)
            kinds = ("text", "input_audio") if sounds else ("text",)
            kind = _named(part, "type", at, f"this model takes {' and '.join(kinds)} here", kinds)
            if kind == "text":
                text = self._text(part.get("text"), f"{at}.text")
                if found and isinstance(found[-1], str):
                    found[-1] += f"\n{text}"
                else:
                    found.append(text)
            else:
                found.append(self._sound(part.get("input_audio"), f"{at}.input_audio"))
        return [part for part in found if not isinstance(part, str) or part.strip()]

    def _text(self, given: Any, place: str) -> str:
        if not isinstance(given, str):
            raise ProtocolError(f"{place} must be a text", param=place)
        self._characters += len(given)
        if self._characters > LONGEST_TEXT:
            message = f"the messages have more than {LONGEST_TEXT:,} characters; leave the oldest out"
            raise ProtocolError(message, "context_length_exceeded", "messages")
        return given

    def _sound(self, given: Any, place: str) -> Tensor:
        data = from_base64(given.get("data") if isinstance(given, dict) else None, f"{place}.data")
        clip = decoded(data, min(self._longest, MOST_SECONDS), f"{place}.data")
        self._seconds += len(clip) / SAMPLE_RATE
        if self._seconds > MOST_SECONDS:
            message = f"the messages have more than {MOST_SECONDS:g} s of sound; leave the oldest out"
            raise ProtocolError(message, "context_length_exceeded", "messages")
        return clip


def _named(given: dict[str, Any], name: str, place: str, way: str, known: Sequence[str]) -> str:
    """A name of an object, one of those that are known."""
    place, found = f"{place}.{name}", given.get(name)
    if isinstance(found, str) and found in known:
        return found
    if name not in given:
        raise ProtocolError(f"{place} is missing; {way}", "missing_required_parameter", place)
    raise ProtocolError(f"{place} is {shown(found)}; {way}", param=place)


async def in_decoder(work: Callable[..., T], *arguments: Any) -> T:
    """What a function that decodes sound returns. Of all requests two run at once: the memory that decoding takes is theirs."""
    return await asyncio.get_running_loop().run_in_executor(_DECODERS, work, *arguments)


def decoded(data: bytes, longest: float, place: str) -> Tensor:
    """Samples [S] at 16 kHz of a sound file's bytes; ProtocolError with the place where it is none that is read here, is cut,
    or has too many channels, too high a rate, or less than `SHORTEST` or more than `longest` seconds."""
    if not data:
        raise ProtocolError(f"{place} is empty; send a sound file", "invalid_audio", place)
    try:
        with opened(data, f"sound of {len(data)} bytes") as recording:
            rate, channels = recording.rate, recording.channels
        if channels > MOST_CHANNELS:
            raise ProtocolError(f"{place} has {channels} channels; send mono or stereo", "invalid_audio", place)
        if rate > MOST_RATE:
            raise ProtocolError(f"{place} has {rate:,} Hz; send at most {MOST_RATE:,}", "invalid_audio", place)
        clip = read_sound(data, SAMPLE_RATE, max_seconds=longest)
    except UserError as error:
        raise ProtocolError(f"{place}: {error}", "invalid_audio", place) from None
    if len(clip) < SHORTEST * SAMPLE_RATE:
        seconds = len(clip) / SAMPLE_RATE
        raise ProtocolError(
            f"{place} is too short: {seconds:.3g} s of sound; send {SHORTEST:g} s or more", "audio_too_short", place
        )
    return clip
