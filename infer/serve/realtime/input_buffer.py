"""The sound that a client has sent and not yet committed, and the part that the engine hears while somebody speaks."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from infer.pcm import G711_RATE, PCM_RATE, Resampler, decode, to_int16
from infer.serve.realtime.protocol import ProtocolError
from omni.errors import UserError
from omni.generate.listening import AudioSoFar
from omni.generate.turn_end import TurnFrames

PIECE = 0.1  # seconds of the pieces that are given at least; each takes some time of the loop


class InputBuffer:
    """Samples at 24 kHz, at most so many seconds, from second `start` to `end` of the session's input."""

    def __init__(self, most: float) -> None:
        self.most = most
        self._form = "audio/pcm"
        self._rate = Resampler(PCM_RATE, PCM_RATE)
        self._half = b""  # the first byte of a sample whose second has not come
        self._pieces: deque[np.ndarray] = deque()
        self._samples = self._gone = 0  # that it holds, and of the input before them

    @property
    def seconds(self) -> float:
        return self._samples / PCM_RATE

    @property
    def start(self) -> float:
        return self._gone / PCM_RATE

    @property
    def end(self) -> float:
        return (self._gone + self._samples) / PCM_RATE

    def append(self, data: bytes, form: str) -> np.ndarray:
        """Take raw sound of a format, in pieces that may end within a sample; returns its whole samples [S] at 24 kHz, int16.
        ProtocolError for more sound than it holds."""
        if form != self._form:
            rate = PCM_RATE if form == "audio/pcm" else G711_RATE
            self._form, self._rate, self._half = form, Resampler(rate, PCM_RATE), b""
        if form == "audio/pcm":
            data = self._half + data
            whole = len(data) // 2 * 2
            self._half = data[whole:]
            return self.add(np.frombuffer(data[:whole], "<i2"))
        self._check_room(len(data) * PCM_RATE // G711_RATE)
        return self.add(to_int16(self._rate.push(decode(data, form))))

    def _check_room(self, count: int) -> None:
        if self._samples + count > self.most * PCM_RATE:
            raise ProtocolError(
                f"the buffer holds at most {self.most:g} s of sound; commit or clear it", "input_audio_buffer_full", "audio"
            )

    def add(self, samples: np.ndarray) -> np.ndarray:
        """Take samples [S] at 24 kHz, int16; ProtocolError where they are too many."""
        self._check_room(len(samples))
        self._pieces.append(samples)
        self._samples += len(samples)
        return samples

    def make_room(self, count: int) -> None:
        """Drop the oldest samples, until so many more can be taken."""
        self._drop(self._samples + count - int(self.most * PCM_RATE))

    def forget(self, before: float) -> None:
        """Drop what came before a second of the input."""
        self._drop(round(before * PCM_RATE) - self._gone)

    def _drop(self, count: int) -> None:
        count = min(max(count, 0), self._samples)
        self._samples, self._gone = self._samples - count, self._gone + count
        while count:
            piece = self._pieces.popleft()
            if len(piece) > count:
                self._pieces.appendleft(piece[count:])
            count -= min(len(piece), count)

    def part(self, first: float, skip: int, last: float) -> np.ndarray:
        """The samples [S], int16, between two seconds of the input, without the first `skip` that are there."""
        begin = skip + max(round(first * PCM_RATE) - self._gone, 0)
        end = min(round(last * PCM_RATE) - self._gone, self._samples)
        pieces, at = list[np.ndarray](), self._samples
        for piece in reversed(self._pieces):
            if at <= begin:
                break
            at -= len(piece)
            pieces.append(piece[max(begin - at, 0) : max(end - at, 0)])
        return np.concatenate([np.zeros(0, np.int16), *reversed(pieces)])

    def take(self, first: float = 0.0, last: float = math.inf) -> np.ndarray:
        """The samples [S], int16, between two seconds of the input; the buffer keeps what came after them."""
        last = min(last, self.end)
        sound = self.part(first, 0, last)
        self.forget(last)
        return sound

    def drop_half_sample(self) -> None:
        """Drop the first half of a sample: the next bytes begin with a whole one."""
        self._half = b""


class TurnSound:
    """The engine's listening to the sound of one turn; `over`: it has ended, or was never possible.

    Args:
        listen: makes the engine's listening (`omni.generate.listening.Listening`) for the conversation.
    """

    def __init__(self, listen: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.over = False
        self._listen = listen
        self._listening: Any = None
        self._pushed: list[np.ndarray] = []
        self._count = self._peeked = 0  # samples, of which the latter may not belong to the turn

    @property
    def frames(self) -> TurnFrames | None:
        """The turn head's probabilities by frame; None where the turn is not listened to."""
        listening = self._listening
        return None if listening is None or self.over else listening.turn

    async def begin(self) -> None:
        """Begin to listen; a question that the engine cannot listen to is asked whole."""
        try:
            self._listening = await self._listen()
        except UserError:
            self.over = True
        if self.over:
            await self.drop()

    def so_far(self) -> AudioSoFar | None:
        """The turn so far, as a question; None where it is not listened to."""
        return None if self._listening is None or self.over else self._listening.so_far()

    def follow(self, buffer: InputBuffer, first: float, last: float) -> None:
        """Pushes new samples of the turn from the buffer: from second `first` of the input to second `last`, before which all
        surely belongs to it. The turn head also peeks at what came since."""
        if self._listening is None or self.over:
            return
        if len(samples := buffer.part(first, self._count, last)) >= PIECE * PCM_RATE:
            self._give(samples)
        if self.frames is None or self.over:
            return
        count = max(self._count, self._peeked)
        if len(samples := buffer.part(first, count, buffer.end)) >= PIECE * PCM_RATE and self._try("peek", samples):
            self._peeked = count + len(samples)

    def _give(self, samples: np.ndarray) -> None:
        if self._try("push", samples):
            self._pushed.append(samples)
            self._count += len(samples)

    def _try(self, method: str, samples: np.ndarray) -> bool:
        try:
            getattr(self._listening, method)(samples)
        except UserError:  # too long, or the engine was lost: the question says so
            self.over = True
        return not self.over

    def heard(self, session: Any, sound: np.ndarray) -> Any:
        """The session's listening to the committed sound [S], with the rest pushed; None where it heard other sound or none."""
        listening = self._listening
        if listening is None or self.over or listening.session is not session:
            return None
        pushed = np.concatenate([*self._pushed, sound[:0]])
        if not np.array_equal(pushed, sound[: len(pushed)]):
            return None
        self._give(sound[len(pushed) :])
        return None if self.over else listening

    async def drop(self) -> None:
        """Drop the listening: the sound was no question."""
        self.over = True
        listening, self._listening = self._listening, None
        if listening is not None:
            await asyncio.to_thread(listening.drop)
