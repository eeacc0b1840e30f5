"""Answers of the engine for requests: their events, their sound at 24 kHz in OpenAI's formats, what they used, and kept ones.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

import io
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import soundfile

from infer.pcm import PCM_RATE, Resampler, encode
from infer.serve.errors import Failure
from infer.serve.realtime.protocol import Event
from omni.audio.wav import wav_header
from omni.generate.results import AudioChunk, Ended
from omni.generate.results import Event as Output
from omni.tasks import Turn

if TYPE_CHECKING:
    from torch import Tensor

    from omni.generate.answer_stream import AnswerStream
    from omni.generate.messages import Message

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


async def begun(answer: AnswerStream) -> AsyncIterator[Output]:
    """The events of an answer whose first one has come, so that what is wrong with the question is raised here. Failure where
    the answer broke, also by the iterator."""
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
        raise Failure(503, "the answer was cancelled by the server; ask again", "server_error", "server_error", retry=True)
    return event


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a conversation (ids of text, positions of sound): read up to the last question, written in the last
    answer."""

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


def token_counts(turns: Sequence[Turn]) -> TokenCounts:
    """The tokens of the last of a session's turns."""
    text = audio = said = spoken = 0
    for turn in turns:
        text, audio = text + said + len(turn.system) + len(turn.question), audio + spoken + turn.features
        said, spoken = len(turn.text or ()), 0 if turn.codes is None else turn.codes.shape[1]
    return TokenCounts(text, audio, said, spoken)


def chat_usage(tokens: TokenCounts) -> Event:
    """`usage` of chat completions."""
    return {
        "prompt_tokens": tokens.read,
        "completion_tokens": tokens.written,
        "total_tokens": tokens.read + tokens.written,
        "prompt_tokens_details": {"text_tokens": tokens.read_text, "audio_tokens": tokens.read_audio, "cached_tokens": 0},
        "completion_tokens_details": {
            "text_tokens": tokens.written_text,
            "audio_tokens": tokens.written_audio,
            "reasoning_tokens": 0,
        },
    }


class KeptAnswers:
    """Spoken answers as the engine's history had them, by the ids under which later requests may refer to them."""

    def __init__(self, most: int = KEPT, seconds: float = KEPT_SECONDS) -> None:
        self._most, self._seconds = most, seconds
        self._answers: OrderedDict[str, tuple[str, float, Message]] = OrderedDict()  # owner, end, answer; oldest first

    def add(self, answer_id: str, owner: str, answer: Message) -> int:
        """Keep an answer for the owner of a key; returns when it is forgotten, in seconds since 1970."""
        end = time.time() + self._seconds
        self._answers[answer_id] = (owner, end, answer)
        for old, (_, until, _) in list(self._answers.items()):
            if len(self._answers) <= self._most and until >= time.time():
                break
            del self._answers[old]
        return int(end)

    def find(self, answer_id: str, owner: str) -> Message | None:
        """The answer of that id; None where there is none any more, or it is another's."""
        whose, end, answer = self._answers.get(answer_id, ("", 0.0, None))
        return answer if whose == owner and end >= time.time() else None


def encoded(samples: np.ndarray, form: str) -> bytes:
    """Samples [S] at 24 kHz in one of the formats of `MEDIA`; what is beyond -1 to 1 is clipped."""
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


def resampled(sound: Tensor, rate: int) -> np.ndarray:
    """Samples [S] at 24 kHz of an answer's sound [S] at `rate` samples per second."""
    resampler = Resampler(rate, PCM_RATE)
    return np.concatenate([resampler.push(sound.numpy()), resampler.finish()])


async def raw(events: AsyncIterator[Output], rate: int) -> AsyncIterator[bytes]:
    """16-bit samples at 24 kHz of an answer's sound, as it comes."""
    resampler = Resampler(rate, PCM_RATE)
    async for event in events:
        if isinstance(event, AudioChunk) and len(samples := resampler.push(event.samples.numpy())):
            yield encode(samples, "audio/pcm")
    if len(samples := resampler.finish()):
        yield encode(samples, "audio/pcm")
