"""Answers of the engine for requests: their events, their sound at 24 kHz in OpenAI's formats, what they used, and kept ones.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

import io
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import soundfile

from infer.pcm import PCM_RATE, Resampler, encode
from infer.serve.realtime.protocol import ProtocolError
from omni.audio.wav import wav_header
from omni.generate.results import AudioChunk, Ended, TextDelta
from omni.generate.results import Event as Output
from omni.tasks import Turn

if TYPE_CHECKING:
    from torch import Tensor

    from omni.generate.answer_stream import AnswerStream
    from omni.generate.history import Message

T = TypeVar("T")

KEPT, KEPT_SECONDS = 1000, 3600  # number of spoken answers that can be referred to by their ids, and for how long

FILES = {"mp3": ("MP3", None), "flac": ("FLAC", None), "opus": ("OGG", "OPUS")}
"""libsndfile's names of the formats that are written when the sound is whole."""

MEDIA = {
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
"""Media types by format."""

_BLOCK = 1 << 16  # samples that are encoded at a time
_LEAST = PCM_RATE // 100  # samples of a file: those of some formats are none without any


async def unbroken(answer: AnswerStream) -> AsyncIterator[Output]:
    """The events of an answer; ProtocolError where it broke."""
    async for event in answer:
        if isinstance(event, Ended) and event.reason == "error":
            raise ProtocolError(event.error or "the answer broke", "server_error", status=500)
        if isinstance(event, Ended) and event.reason == "cancelled":
            problem = "the answer was cancelled by the server; ask again"
            raise ProtocolError(problem, "server_error", status=503, retry=True)
        yield event


async def begun(items: AsyncIterator[T], head: Sequence[T] = (), missing: ProtocolError | None = None) -> AsyncIterator[T]:
    """The items after those of `head`, once the first has come: what is wrong with the question is raised here, and `missing`
    where there is none."""
    first = await anext(items, None)
    if first is None:
        raise missing or ProtocolError("the answer has no events", "server_error", status=500)

    async def whole() -> AsyncIterator[T]:
        for item in (*head, first):
            yield item
        async for item in items:
            yield item

    return whole()


async def deltas(events: AsyncIterator[Output], rate: int) -> AsyncIterator[str | bytes | Ended]:
    """An answer's pieces of text and of sound (16-bit samples at 24 kHz) as they come, and its end."""
    resampler: Resampler | None = None
    async for event in events:
        samples = np.zeros(0, np.float32)
        if isinstance(event, TextDelta):
            yield event.text
        elif isinstance(event, AudioChunk):
            resampler = resampler or Resampler(rate, PCM_RATE)
            samples = resampler.push(event.samples.numpy())
        elif isinstance(event, Ended) and resampler is not None:
            samples = resampler.finish()
        if len(samples):
            yield encode(samples, "audio/pcm")
        if isinstance(event, Ended):
            yield event


class TokenCounts(NamedTuple):
    """Token counts of a conversation (ids of text, positions of sound): read up to the last question, written in the last
    answer."""

    read_text: int
    read_audio: int
    written_text: int
    written_audio: int


def token_counts(turns: Sequence[Turn]) -> TokenCounts:
    """The tokens of the last of a session's turns."""
    text = audio = said = spoken = 0
    for turn in turns:
        text, audio = text + said + len(turn.system or ()) + len(turn.question), audio + spoken + turn.features
        said, spoken = len(turn.text or ()), 0 if turn.codes is None else turn.codes.shape[1]
    return TokenCounts(text, audio, said, spoken)


@dataclass(eq=False)
class KeptAnswers:
    """Spoken answers as the engine's history had them, by the ids under which later requests may refer to them."""

    most: int = KEPT
    seconds: float = KEPT_SECONDS
    _answers: dict[str, tuple[str, float, Message]] = field(default_factory=dict)  # owner, end, answer; oldest first

    def add(self, answer_id: str, owner: str, answer: Message) -> int:
        """Keep an answer for the owner of a key; returns when it is forgotten, in seconds since 1970."""
        end = time.time() + self.seconds
        self._answers[answer_id] = (owner, end, answer)
        for old, (_, until, _) in list(self._answers.items()):
            if len(self._answers) <= self.most and until >= time.time():
                break
            del self._answers[old]
        return int(end)

    def find(self, answer_id: str, owner: str) -> Message | None:
        """The answer of that id; None where there is none any more, or it is another's."""
        whose, end, answer = self._answers.get(answer_id, ("", 0.0, None))
        return answer if whose == owner and end >= time.time() else None


def encoded(sound: Tensor, rate: int, form: str) -> bytes:
    """An answer's sound [S] at `rate` samples per second, at 24 kHz in one of the formats of `MEDIA`; what is beyond -1 to 1 is
    clipped."""
    resampler = Resampler(rate, PCM_RATE)
    samples = np.concatenate([resampler.push(sound.numpy()), resampler.finish()])
    if form not in FILES:
        data = encode(samples, "audio/pcm")
        return wav_header(PCM_RATE, len(data)) + data if form == "wav" else data
    samples = np.pad(np.clip(samples, -1, 1), (0, max(_LEAST - len(samples), 0)))
    container, coding = FILES[form]
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", PCM_RATE, 1, format=container, subtype=coding) as file:
        for start in range(0, len(samples), _BLOCK):
            file.write(samples[start : start + _BLOCK])
    return out.getvalue()
