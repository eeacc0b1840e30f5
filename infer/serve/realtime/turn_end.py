"""The model's own judgement of where a turn ends, for `semantic_vad`: its encoder and turn head, over one session's sound.

Samples go in, a decision comes out; the encoder runs in a thread of its own. Where the sound is encoded elsewhere while it
comes, its frames can be judged there, behind the same interface.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from infer.resampler import Resampler
from infer.turns.settings import PCM_RATE
from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.generate.turn_end import RULES, TurnListener, TurnStream, ended


class TurnEnds:
    """The turn head of the model, for all sessions."""

    def __init__(self, listener: TurnListener) -> None:
        self.listener = listener
        self.thread = ThreadPoolExecutor(1, "omni-turns", lambda: torch.set_num_threads(1))

    @classmethod
    def of(cls, model: str) -> TurnEnds | None:
        """That of a model folder; None where it has no turn head."""
        listener = TurnListener.from_folder(model)
        return None if listener is None else cls(listener)


class SessionTurnEnd:
    """Follows the turns of one session, one after another; without a turn head it decides nothing."""

    def __init__(self, ends: TurnEnds | None) -> None:
        self._ends = ends
        self._stream: TurnStream | None = None
        self._start = 0.0  # second of the input at which the turn's sound begins

    async def begin(self, start: float, samples: np.ndarray) -> None:
        """A turn has begun at a second of the input; `samples` [S], int16 at 24 kHz, came since."""
        if self._ends is None:
            return
        self._start, self._stream = start, self._ends.listener.stream()
        self._rate = Resampler(PCM_RATE, SAMPLE_RATE)
        self._heard = torch.zeros(0, 2)
        await self.push(samples)

    async def push(self, samples: np.ndarray) -> None:
        """More samples [S] of the turn that is under way, if one is."""
        stream = self._stream
        if stream is None or self._ends is None:
            return
        sound = torch.from_numpy(self._rate.push(samples.astype(np.float32) / 32768))
        try:
            new = await asyncio.get_running_loop().run_in_executor(self._ends.thread, stream.push, sound)
        except UserError:  # longer than the encoder takes: silence ends the turn
            self.stop()
            return
        if stream is self._stream:
            self._heard = torch.cat([self._heard, new])

    def stop(self) -> None:
        """The turn is over."""
        self._stream = None

    def ended(self, second: float, eagerness: str) -> bool | None:
        """Whether the turn has ended, as far as is known at a second of the input; None where the model does not judge."""
        if self._stream is None or self._ends is None:
            return None
        rule, frames = RULES[eagerness], int((second - self._start) * self._ends.listener.frames_per_second)
        last = self._heard[max(frames - rule.frames, 0) : max(frames, 0)] if frames <= len(self._heard) else self._heard
        return bool(len(last)) and bool(ended(last[-rule.frames :], rule)[-1])
