"""A turn's sound, given to the engine while somebody speaks, so that it is heard when the turn is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from infer.serve.realtime.configuration import PCM_RATE
from infer.serve.realtime.input_buffer import InputBuffer
from omni.errors import UserError
from omni.generate.listening import AudioSoFar
from omni.generate.turn_end import TurnFrames

PIECE = 0.1
"""Seconds of the pieces that are given at least; each takes some time of the loop."""


class TurnSound:
    """The sound of one turn.

    Args:
        listen: makes the engine's listening (`omni.generate.listening.Listening`) for the conversation.

    Attributes:
        over: it is listened to no more.
    """

    def __init__(self, listen: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.over = False
        self._listen = listen
        self._listening: Any = None
        self._given: list[np.ndarray] = []
        self._count = self._peeked = 0  # samples, of which the latter may not belong to the turn

    @property
    def frames(self) -> TurnFrames | None:
        """What the model's turn head says of its frames; None where it is not asked."""
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
        """What was heard of it by now, as a question; None where it is not listened to."""
        return None if self._listening is None or self.over else self._listening.so_far()

    def follow(self, buffer: InputBuffer, first: float | None, last: float) -> None:
        """Give what the buffer has of the turn. The turn head also hears what came since.

        Args:
            first: second of the input at which the turn begins; None for the buffer's first.
            last: second of the input before which all surely belongs to the turn.
        """
        if self._listening is None or self.over:
            return
        if len(samples := buffer.part(first, self._count, last)) >= PIECE * PCM_RATE:
            self._give(samples)
        if self.frames is None or self.over:
            return
        given = max(self._count, self._peeked)
        if len(samples := buffer.part(first, given, buffer.end)) >= PIECE * PCM_RATE and self._try("peek", samples):
            self._peeked = given + len(samples)

    def _give(self, samples: np.ndarray) -> None:
        if self._try("push", samples):
            self._given.append(samples)
            self._count += len(samples)

    def _try(self, method: str, samples: np.ndarray) -> bool:
        try:
            getattr(self._listening, method)(samples)
        except UserError:  # too long, or the engine was lost: the question says so
            self.over = True
        return not self.over

    def heard(self, session: Any, sound: np.ndarray) -> Any:
        """What a session has heard of the committed sound [S], with the rest of it; None where it has not listened to it."""
        listening = self._listening
        if listening is None or self.over or listening.session is not session:
            return None
        given = np.concatenate([*self._given, sound[:0]])
        if not np.array_equal(given, sound[: len(given)]):
            return None
        self._give(sound[len(given) :])
        return None if self.over else listening

    async def drop(self) -> None:
        """It was no question."""
        self.over = True
        listening, self._listening = self._listening, None
        if listening is not None:
            await asyncio.to_thread(listening.drop)
