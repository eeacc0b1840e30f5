"""Features of a spoken question, made while its sound comes, where the encoder hears in chunks.

push: samples (any thread) --> [waiting] --> advance: a chunk (the stepping thread) --> features --> finish: the rest
peek: samples that may not belong to it --> [peeked] --> advance --> the turn head --> `turn`

Chunks of peeked sound are encoded behind those of the question. Where the sound turns out to belong to it, they are its own.

Dimensions: S samples, T encoder frames, N features, W width.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from omni.errors import UserError
from omni.generate.turn_end import TurnListener
from omni.lora.attach import active_edits, changes
from omni.model.speech_model import SpeechModel

_SOUNDS = count()

TellTurn = Callable[[int, Tensor], None]
"""Is told the turn head's probabilities [T, 2] of the frames from a number on."""


def new_sound() -> int:
    """A number for a spoken question's features, that no other of this process has."""
    return next(_SOUNDS)


@dataclass(frozen=True)
class KnownFeatures:
    """Features [N, W] so far of a question that is still coming, and the number by which its stream has them."""

    number: int
    features: Tensor


@dataclass
class _Ahead:
    """Chunks that were encoded beyond those of the question: the encoder's stream behind them, the samples of the sound up to
    there, and the frames of each."""

    stream: Any
    taken: int
    frames: list[Tensor] = field(default_factory=list)


class FeatureStream:
    """The features of one question; the adapters and edits of its conversation act in the blocks of `using` around its calls.

    Args:
        task: name of the task that it is going to be asked as, for a projector that is gated by task.
        turn: told the turn head's probabilities of each frame, peeked ones too; None leaves the head out.

    Attributes:
        number: of its features (`new_sound`).
        features: [N, W], those that are known.
        closed: nobody wants it any more.
        lost: they cannot be continued: the model was moved, or its adapters or edits changed.
    """

    def __init__(self, model: SpeechModel, task: str, turn: TellTurn | None = None) -> None:
        size = model.config.encoder.chunk_samples
        assert size is not None
        self.number, self.task, self.size = new_sound(), task, size
        self.features: Tensor | None = None
        self.closed = self.lost = False
        self._model = model
        self._turn = turn
        self._listener = None if turn is None or model.turn_head is None else TurnListener.of(model)
        self._lock = threading.Lock()  # of whoever encodes
        self._data = threading.Lock()  # guards what waits
        self._pieces: list[Tensor] = []
        self._waiting: deque[Tensor] = deque()
        self._peeked: list[Tensor] = []
        self._came = self._taken = self._beyond = 0  # samples; `_beyond` were peeked at
        self._stream: Any = None
        self._ahead: _Ahead | None = None
        self._frames: Tensor | None = None  # that do not fill a feature yet
        self._encoded = self._judged = 0  # frames of the question, and of all that the turn head has heard
        self._under: Any = None
        self._finished = False

    @property
    def due(self) -> bool:
        """Whether a chunk waits to be encoded."""
        if self.closed or self.lost:
            return False
        return self._came - self._taken >= self.size or self._came + self._beyond - self._reached >= self.size

    @property
    def _reached(self) -> int:
        """Samples of the sound that were encoded, peeked ones included."""
        ahead = self._ahead
        return self._taken if ahead is None else max(ahead.taken, self._taken)

    @property
    def begun(self) -> bool:
        """Whether any of it was encoded."""
        return self._taken > 0

    @property
    def sound(self) -> Tensor:
        """All samples that came, [S]."""
        return torch.cat(self._pieces) if self._pieces else torch.zeros(0)

    @property
    def known(self) -> int:
        """Number of the features that are known."""
        return 0 if self.features is None else len(self.features)

    def so_far(self) -> KnownFeatures:
        """The features that are known by now; UserError where none is, or they are lost."""
        if self.features is None or self.lost:
            raise UserError("nothing of this sound has been heard so far; ask later")
        return KnownFeatures(self.number, self.features)

    def push(self, samples: Tensor) -> None:
        """Take the next samples [S] at 16 kHz; they are kept, not copied."""
        if not len(samples):
            return
        with self._data:
            self._pieces.append(samples)
            self._waiting.append(samples)
            self._came += len(samples)
            if self._beyond:
                self._keep_peeked(samples)

    def _keep_peeked(self, samples: Tensor) -> None:
        """Samples came that were peeked at before: what was made of others than these is dropped."""
        peeked = torch.cat(self._peeked)
        both = min(len(peeked), len(samples))
        self._peeked = [peeked[both:]]
        self._beyond = len(peeked) - both
        if not torch.allclose(peeked[:both], samples[:both], rtol=0, atol=1e-6):
            self._drop_peeked()
            self._judged = self._encoded

    def peek(self, samples: Tensor) -> None:
        """Take samples [S] behind all that came and was peeked at, which may not belong to the question; where they do, they
        are pushed too. Only the turn head hears them."""
        if self._listener is not None and len(samples) and not self._finished:
            with self._data:
                self._peeked.append(samples)
                self._beyond += len(samples)

    def forget_peeked(self) -> None:
        """The question has ended: what was peeked at is none of it."""
        with self._data:
            self._listener = None
            self._drop_peeked()

    def _drop_peeked(self) -> None:
        self._peeked, self._beyond, self._ahead = [], 0, None

    def advance(self) -> bool:
        """Encode the chunk that waits, unless another thread encodes; returns whether it did."""
        if not self.due or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._came - self._taken >= self.size:
                self._encode(self.size)
            else:
                self._encode_ahead()
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
                self._stream = self._frames = self._ahead = None
                self._waiting.clear()
            return None if self.lost else self.features

    def _begin(self) -> None:
        """Begin to encode; what was encoded is lost where the model is another by now."""
        model, under = self._model, (active_edits(self._model), changes(self._model), self._model.device)
        if self._stream is None:
            self._stream, self._under = model.encoder.stream(), under
        self.lost |= under != self._under

    @torch.inference_mode()
    def _encode(self, samples: int, last: bool = False) -> None:
        """Encode the next samples, and what is left where they are the last; chunks that were encoded ahead are taken."""
        self._begin()
        if self.lost:
            return
        try:
            frames = [] if self._frames is None else [self._frames]
            new = self._own_ahead() if not last else None
            new = self._stream.push(self._next(samples)) if new is None else new
            frames.append(new)
            self._judge(self._encoded, new)
            self._encoded += len(new)
            if last:
                frames.append(self._stream.finish())
            self._project(torch.cat(frames), last)
        except Exception:  # what is wrong with it is said when the whole is encoded
            self.lost = True

    def _own_ahead(self) -> Tensor | None:
        """The frames of what was encoded ahead, where all of it has come by now; None where the next chunk is to be encoded."""
        with self._data:
            ahead, self._ahead = self._ahead, None
        if ahead is None or not self._taken < ahead.taken <= self._came:
            return None
        self._stream = ahead.stream
        self._next(ahead.taken - self._taken)
        return torch.cat(ahead.frames)

    @torch.inference_mode()
    def _encode_ahead(self) -> None:
        """Encode the next chunk of what was peeked at."""
        self._begin()
        if self.lost:
            return
        with self._data:
            ahead = self._ahead or _Ahead(self._stream.copy(), self._taken)
            samples = torch.cat([*self._waiting, *self._peeked])[ahead.taken - self._taken :][: self.size]
            if len(samples) < self.size:  # they were dropped meanwhile
                return
            self._ahead = ahead
        try:
            new = ahead.stream.push(samples)
        except Exception:  # longer than the encoder takes
            self.forget_peeked()
            return
        self._judge(self._encoded + sum(map(len, ahead.frames)), new)
        with self._data:
            ahead.frames.append(new)
            ahead.taken += self.size

    def _judge(self, first: int, frames: Tensor) -> None:
        """Tell what the turn head says of frames [T, D] from a number on, of which it may have heard some before."""
        listener, frames = self._listener, frames[max(self._judged - first, 0) :]
        if listener is None or self._turn is None or not len(frames):
            return
        first = max(first, self._judged)
        self._judged = first + len(frames)
        self._turn(first, listener.probabilities(frames).cpu())

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
        with self._data:
            while left:
                piece = self._waiting.popleft()
                if len(piece) > left:
                    self._waiting.appendleft(piece[left:])
                    piece = piece[:left]
                taken.append(piece)
                left -= len(piece)
            self._taken += samples
        return torch.cat(taken) if taken else torch.zeros(0)
