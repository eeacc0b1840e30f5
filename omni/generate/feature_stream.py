"""Features of a spoken question, made while its sound comes, where the encoder hears in chunks.

push: samples (any thread) --> [waiting] --> advance: a chunk (the stepping thread) --> features --> finish: the rest

Dimensions: S samples, T encoder frames, N features, W width.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import count
from typing import Any

import torch
from torch import Tensor

from omni.lora.attach import active_edits, changes
from omni.model.speech_model import SpeechModel

_SOUNDS = count()


def new_sound() -> int:
    """A number for a spoken question's features, that no other of this process has."""
    return next(_SOUNDS)


class FeatureStream:
    """The features of one question; the adapters and edits of its conversation act in the blocks of `using` around its calls.

    Args:
        task: name of the task that it is going to be asked as, for a projector that is gated by task.

    Attributes:
        number: of its features (`new_sound`).
        features: [N, W], those that are known.
        closed: nobody wants it any more.
        lost: they cannot be continued: the model was moved, or its adapters or edits changed.
    """

    def __init__(self, model: SpeechModel, task: str) -> None:
        size = model.config.encoder.chunk_samples
        assert size is not None
        self.number, self.task, self.size = new_sound(), task, size
        self.features: Tensor | None = None
        self.closed = self.lost = False
        self._model = model
        self._lock = threading.Lock()  # of whoever encodes
        self._pieces: list[Tensor] = []
        self._waiting: deque[Tensor] = deque()
        self._came = self._taken = 0  # samples
        self._stream: Any = None
        self._frames: Tensor | None = None  # that do not fill a feature yet
        self._under: Any = None
        self._finished = False

    @property
    def due(self) -> bool:
        """Whether a chunk waits to be encoded."""
        return not (self.closed or self.lost) and self._came - self._taken >= self.size

    @property
    def begun(self) -> bool:
        """Whether any of it was encoded."""
        return self._stream is not None

    @property
    def sound(self) -> Tensor:
        """All samples that came, [S]."""
        return torch.cat(self._pieces) if self._pieces else torch.zeros(0)

    @property
    def known(self) -> int:
        """Number of the features that are known."""
        return 0 if self.features is None else len(self.features)

    def push(self, samples: Tensor) -> None:
        """Take the next samples [S] at 16 kHz; they are kept, not copied."""
        if len(samples):
            self._pieces.append(samples)
            self._waiting.append(samples)
            self._came += len(samples)

    def advance(self) -> bool:
        """Encode the chunk that waits, unless another thread encodes; returns whether it did."""
        if not self.due or not self._lock.acquire(blocking=False):
            return False
        try:
            self._encode(self.size)
            return True
        finally:
            self._lock.release()

    def finish(self) -> Tensor | None:
        """All features [N, W], once the sound has ended; None where the whole is to be encoded: nothing of it was before, or
        they are lost."""
        with self._lock:
            if not self._finished:
                self._finished = True
                if self.begun:
                    self._encode(self._came - self._taken, last=True)
                self._stream = self._frames = None
                self._waiting.clear()
            return None if self.lost else self.features

    @torch.inference_mode()
    def _encode(self, samples: int, last: bool = False) -> None:
        """Encode the next samples, and what is left where they are the last."""
        model, under = self._model, (active_edits(self._model), changes(self._model), self._model.device)
        if self._stream is None:
            self._stream, self._under = model.encoder.stream(), under
        self.lost |= under != self._under
        if self.lost:
            return
        try:
            frames = [] if self._frames is None else [self._frames]
            frames.append(self._stream.push(self._next(samples)))
            if last:
                frames.append(self._stream.finish())
            self._project(torch.cat(frames), last)
        except Exception:  # what is wrong with it is said when the whole is encoded
            self.lost = True

    def _project(self, frames: Tensor, last: bool) -> None:
        stack = self._model.config.projector.stack
        count = len(frames) if last else len(frames) // stack * stack
        self._frames = frames[count:]
        if count:
            new = self._model.projector(frames[:count], [count], [self.task])
            self.features = new if self.features is None else torch.cat([self.features, new])

    def _next(self, samples: int) -> Tensor:
        """The next samples that wait, [samples]."""
        taken, left = list[Tensor](), samples
        while left:
            piece = self._waiting.popleft()
            if len(piece) > left:
                self._waiting.appendleft(piece[left:])
                piece = piece[:left]
            taken.append(piece)
            left -= len(piece)
        self._taken += samples
        return torch.cat(taken) if taken else torch.zeros(0)
