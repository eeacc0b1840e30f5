"""Hears a question in the engine while its sound comes: the features of its frames, and where it ends by the model's turn head.

Where the encoder hears in chunks (`EncoderConfig.chunk_samples`), each is encoded and prefilled as soon as it is full, in time
that the engine does not need for others, so that at the question's end only the last is left:

    push: samples (any thread) --> [waiting] --> advance: a chunk (the stepping thread) --> features --> finish: the rest
    peek: samples that may not belong to it --> [peeked] --> advance --> the turn head --> `turn`

Chunks of peeked sound are encoded behind those of the question. Where the sound turns out to belong to it, they are its own.

The turn head alone, over sound that is encoded elsewhere:

    listener = TurnListener.from_folder(folder)       # None for a model without a turn head
    frames = listener.encoder.stream().push(samples)
    probabilities = listener.probabilities(frames)    # [T, 2] of voice and of end, for each encoder frame
    ended(probabilities, RULES["medium"])             # [T] bool: the turn may be answered

Dimensions: S samples of 16 kHz sound, T encoder frames, N features, W width.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from omni.checkpoint.folder import load_folder, read_config
from omni.checkpoint.places import WEIGHTS
from omni.encoder.base import Encoder, build_encoder
from omni.errors import UserError
from omni.lora.attach import active_of
from omni.model.speech_model import SpeechModel, Unfilled, check_state
from omni.stores.reading import local_path

VOICE, END = 0, 1
"""Columns of the head."""


@dataclass(frozen=True)
class EndRule:
    """When a turn has ended: where the end's probability has been at least `threshold` for `frames` encoder frames."""

    threshold: float
    frames: int = 2


HANGOVER = 0.1
"""Seconds by which voice activity may find the end of speech too late."""

RULES = {"low": EndRule(0.8), "medium": EndRule(0.4), "high": EndRule(0.2), "auto": EndRule(0.4)}
"""By eagerness, as the Realtime API names it; chosen on the nano model, see docs/training.md."""


def ended(probabilities: Tensor, rule: EndRule) -> Tensor:
    """Frames [T] bool, of probabilities [T, 2], at which a turn has ended."""
    sure = (probabilities[:, END] >= rule.threshold).int()
    before = torch.nn.functional.pad(sure.cumsum(0), (rule.frames, 0))
    return (before[rule.frames :] - before[: -rule.frames]) == rule.frames


class TurnListener:
    """Encoder and turn head of a model; any number of streams."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        self.encoder, self.head = encoder.eval(), head.eval()

    @classmethod
    def of(cls, model: SpeechModel) -> TurnListener:
        """The listener of a model; UserError where it has no turn head."""
        if model.turn_head is None:
            raise UserError("the model has no turn head: train one with model.turn (and encoder.mode chunked)")
        return cls(model.encoder, model.turn_head)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> TurnListener | None:
        """The listener of a model folder in float32, its other weights left unread; None where it has no turn head."""
        config, file = read_config(folder), local_path(folder) / WEIGHTS
        if not config.turn:
            return None
        with Unfilled():
            encoder, head = build_encoder(config.encoder), nn.Linear(config.encoder.width, 2)
        parts = nn.ModuleDict({"encoder": encoder, "turn_head": head})
        with safe_open(file, "pt") as stored:
            names = [name for name in stored.keys() if name.partition(".")[0] in parts]  # noqa: SIM118
            if "turn_head.scale" in names:  # in int8
                return cls.of(load_folder(folder, mute=True).model)
            state = {name: stored.get_tensor(name) for name in names}
        check_state(state, parts.state_dict(), str(file))
        parts.load_state_dict(state, assign=True)
        return cls(encoder.float(), head.float())

    @torch.no_grad()
    def probabilities(self, frames: Tensor) -> Tensor:
        """Probabilities [T, 2] of voice and end, float32, of encoder frames [T, D], one by one: a product of other rows would
        be rounded otherwise."""
        return torch.cat([self.head(frame).float().sigmoid() for frame in frames.split(1)])


class TurnFrames:
    """Probabilities [T, 2] of voice and of end, of the first frames of a sound that is encoded elsewhere while it comes.

    They may come late: a frame's probabilities hold for its time in the sound, not for when they are known. `rate`: frames per
    second of the sound."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.known = torch.zeros(0, 2)

    def put(self, first: int, new: Tensor) -> None:
        """Takes the probabilities of the frames from `first` on."""
        self.known = torch.cat([self.known[:first], new])

    def ended(self, second: float, voiced: float, rule: EndRule) -> bool:
        """Whether the turn has ended, at a second of the sound whose last speech was at `voiced`: frames before that speech do
        not say so."""
        frames = min(int(second * self.rate), len(self.known))
        if frames < rule.frames or frames / self.rate < voiced - HANGOVER:
            return False
        return bool(ended(self.known[frames - rule.frames : frames], rule)[-1])


# --- features ---------------------------------------------------------------------------------------------------------

new_sound = itertools.count().__next__
"""A number for a spoken question's features, that no other of this process has."""


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
        turn: is told the turn head's probabilities [T, 2] of the frames from a number on, peeked ones too; None leaves the
            head out.

    Attributes:
        number: of its features (`new_sound`).
        features: [N, W], those that are known; taken: samples that were encoded.
        closed: nobody wants it any more.
        lost: they cannot be continued: the model was moved, or its adapters or edits changed.
    """

    def __init__(self, model: SpeechModel, task: str, turn: Callable[[int, Tensor], None] | None = None) -> None:
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
        self._waiting = self._peeked = torch.zeros(0)
        self.taken = 0
        self._stream: Any = None
        self._ahead: _Ahead | None = None
        self._frames: Tensor | None = None  # that do not fill a feature yet
        self._encoded = self._judged = 0  # frames of the question, and of all that the turn head has heard
        self._under: Any = None
        self._finished = False

    @property
    def due(self) -> bool:
        """Whether a chunk waits to be encoded."""
        waiting, ahead = len(self._waiting), self._ahead
        further = 0 if ahead is None else max(ahead.taken - self.taken, 0)  # samples that were encoded ahead
        lacking = max(waiting, waiting + len(self._peeked) - further)
        return lacking >= self.size and not (self.closed or self.lost)

    @property
    def sound(self) -> Tensor:
        """All samples that came, [S]."""
        return torch.cat(self._pieces) if self._pieces else torch.zeros(0)

    @property
    def known(self) -> int:
        """Number of the features that are known."""
        return 0 if self.features is None else len(self.features)

    def so_far(self) -> tuple[int, Tensor]:
        """Its number, and the features that are known by now; UserError where none is, or they are lost."""
        if self.features is None or self.lost:
            raise UserError("nothing of this sound has been heard so far; ask later")
        return self.number, self.features

    def push(self, samples: Tensor) -> None:
        """Take the next samples [S] at 16 kHz; they are kept, not copied."""
        with self._data:
            self._pieces.append(samples)
            self._waiting = torch.cat([self._waiting, samples])
            both = min(len(self._peeked), len(samples))  # they were peeked at before
            before, self._peeked = self._peeked[:both], self._peeked[both:]
            if not torch.allclose(before, samples[:both], rtol=0, atol=1e-6):  # what was made of others is dropped
                self._peeked, self._ahead = torch.zeros(0), None
                self._judged = self._encoded

    def peek(self, samples: Tensor) -> None:
        """Take samples [S] behind all that came and was peeked at, which may not belong to the question; where they do, they
        are pushed too. Only the turn head hears them."""
        if self._listener is not None and len(samples) and not self._finished:
            with self._data:
                self._peeked = torch.cat([self._peeked, samples])

    def forget_peeked(self) -> None:
        """The question has ended: what was peeked at is none of it."""
        with self._data:
            self._listener = None
            self._peeked, self._ahead = torch.zeros(0), None

    def advance(self) -> bool:
        """Encode the chunk that waits, unless another thread encodes; returns whether it did."""
        if not self.due or not self._lock.acquire(blocking=False):
            return False
        try:
            if len(self._waiting) >= self.size:
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
                if self.taken:
                    self._encode(len(self._waiting), last=True)
                self._stream = self._frames = self._ahead = None
                self._waiting = torch.zeros(0)
            return None if self.lost else self.features

    def _begin(self) -> bool:
        """Begin to encode, or go on; returns whether what was encoded is lost, where the model is another by now."""
        model, active = self._model, active_of(self._model)
        under = active.edits, active.changes, model.device
        if self._stream is None:
            self._stream, self._under = model.encoder.stream(), under
        self.lost |= under != self._under
        return self.lost

    @torch.inference_mode()
    def _encode(self, samples: int, last: bool = False) -> None:
        """Encode the next samples, and what is left where they are the last; chunks that were encoded ahead are taken."""
        if self._begin():
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
            known, projector = torch.cat(frames), self._model.projector
            ready = len(known) // projector.stack * projector.stack * (not self._model.hears_clips)
            count = len(known) if last else ready
            self._frames = known[count:]
            if count:
                (features,) = self._model.hear(projector(known[:count], [count], [self.task]), [count])
                self.features = features if self.features is None else torch.cat([self.features, features])
        except Exception:  # what is wrong with it is said when the whole is encoded
            self.lost = True

    def _own_ahead(self) -> Tensor | None:
        """The frames of what was encoded ahead, where all of it has come by now; None where the next chunk is to be encoded."""
        with self._data:
            ahead, self._ahead = self._ahead, None
        if ahead is None or not 0 < ahead.taken - self.taken <= len(self._waiting):
            return None
        self._stream = ahead.stream
        self._next(ahead.taken - self.taken)
        return torch.cat(ahead.frames)

    @torch.inference_mode()
    def _encode_ahead(self) -> None:
        """Encode the next chunk of what was peeked at."""
        if self._begin():
            return
        with self._data:
            ahead = self._ahead or _Ahead(self._stream.copy(), self.taken)
            samples = torch.cat([self._waiting, self._peeked])[ahead.taken - self.taken :][: self.size]
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

    def _next(self, samples: int) -> Tensor:
        """The next samples that wait, [samples]."""
        with self._data:
            new, self._waiting = self._waiting[:samples], self._waiting[samples:]
            self.taken += samples
        return new
