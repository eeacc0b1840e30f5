"""Answers of the engine for requests: their options and events, what they used, and those that can be referred to later."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infer.serve.realtime.protocol import Event
from infer.serve.rest.errors import AGAIN, Failure
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.results import Event as Output
from omni.tasks import Turn

if TYPE_CHECKING:
    from omni.generate.answer_stream import AnswerStream
    from omni.generate.messages import Message

KEPT, KEPT_SECONDS = 1000, 3600
"""Number of spoken answers that can be referred to by their ids, and for how long."""


async def begun(answer: AnswerStream) -> AsyncIterator[Output]:
    """The events of an answer whose first one has come, so that what is wrong with the question is raised here.

    Raises:
        UserError: of the question.
        Failure: the answer broke; also by the iterator, where it breaks later.
    """
    first = _unbroken(await answer.__anext__())

    async def events() -> AsyncIterator[Output]:
        yield first
        async for event in answer:
            yield _unbroken(event)

    return events()


def _unbroken(event: Output) -> Output:
    if isinstance(event, Ended) and event.reason == "error":
        raise Failure(500, event.error or "the answer broke", "server_error", "server_error")
    if isinstance(event, Ended) and event.reason == "cancelled":
        raise Failure(503, "the answer was cancelled by the server; ask again", "server_error", "server_error", again=AGAIN)
    return event


@dataclass(frozen=True)
class Whole:
    """All of an answer: its text, its chunks of sound, and its end."""

    text: str
    chunks: Sequence[AudioChunk]
    ended: Ended


async def whole(answer: AnswerStream) -> Whole:
    """Wait for all of an answer; raises as `begun` does."""
    text, chunks = [], []
    async for event in await begun(answer):
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, AudioChunk):
            chunks.append(event)
        else:
            ended = event
    return Whole("".join(text), chunks, ended)


@dataclass(frozen=True)
class Used:
    """Tokens of a conversation: ids of text, and positions of sound (features of questions, frames of answers).

    Attributes:
        read_text, read_audio: of the last question and all that was before it.
        written_text, written_audio: of the last answer.
    """

    read_text: int = 0
    read_audio: int = 0
    written_text: int = 0
    written_audio: int = 0

    @property
    def read(self) -> int:
        return self.read_text + self.read_audio

    @property
    def written(self) -> int:
        return self.written_text + self.written_audio


def used(turns: Sequence[Turn]) -> Used:
    """What the last turn used; `turns` of the engine's session."""
    text = audio = said = spoken = 0
    for turn in turns:
        text, audio = text + said + len(turn.system) + len(turn.question), audio + spoken + turn.features
        said, spoken = len(turn.text or ()), 0 if turn.codes is None else turn.codes.shape[1]
    return Used(text, audio, said, spoken)


def chat_usage(found: Used) -> Event:
    """`usage` of chat completions."""
    return {
        "prompt_tokens": found.read,
        "completion_tokens": found.written,
        "total_tokens": found.read + found.written,
        "prompt_tokens_details": {"text_tokens": found.read_text, "audio_tokens": found.read_audio, "cached_tokens": 0},
        "completion_tokens_details": {
            "text_tokens": found.written_text,
            "audio_tokens": found.written_audio,
            "reasoning_tokens": 0,
        },
    }


class KeptAnswers:
    """Spoken answers as the engine's history had them, by the ids under which later requests may refer to them."""

    def __init__(self, most: int = KEPT, seconds: float = KEPT_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._found: OrderedDict[str, tuple[str, float, Message]] = OrderedDict()  # owner, end, answer; oldest first

    def add(self, answer_id: str, owner: str, answer: Message) -> int:
        """Keep an answer for the owner of a key; returns when it is forgotten, in seconds since 1970."""
        end = time.time() + self._seconds
        self._found[answer_id] = (owner, end, answer)
        for old, (_, until, _) in list(self._found.items()):
            if len(self._found) <= self._most and until >= time.time():
                break
            del self._found[old]
        return int(end)

    def find(self, answer_id: str, owner: str) -> Message | None:
        """The answer of that id; None where there is none any more, or it is another's."""
        whose, end, answer = self._found.get(answer_id, ("", 0.0, None))
        return answer if whose == owner and end >= time.time() else None
