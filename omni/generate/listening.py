"""A question that is heard while its sound comes.

    listening = session.listen(sample_rate=24_000)
    listening.push(samples)                            # as they come
    for event in session.ask(listening): ...           # or listening.drop()

Where the encoder hears in chunks (`EncoderConfig.chunk_samples`), each is encoded and prefilled as soon as it is full, in time
that the engine does not need for others, so that at the question's end only the last is left. With other encoders the sound is
gathered, and encoded when it is asked. In the engine:

    push: samples (any thread) --> [waiting] --> advance: a chunk (the stepping thread) --> features --> finish: the rest
    peek: samples that may not belong to it --> [peeked] --> advance --> the turn head --> `turn`

Chunks of peeked sound are encoded behind those of the question. Where the sound turns out to belong to it, they are its own.

Dimensions: S samples, T encoder frames, N features, W width.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from omni.audio.waveform import SoundPieces, as_piece
from omni.errors import UserError
from omni.generate.question import (
    Asked,
    Incoming,
    KnownFeatures,
    asked_by_clip,
    longest,
    new_sound,
    take_all,
)
from omni.generate.turn_end import TurnFrames, TurnListener
from omni.lora.attach import active_of
from omni.model.multitask_projector import SHARING
from omni.model.speech_model import SpeechModel
from omni.tasks import Task, Turn, find_task


class Listening:
    """The sound of one question; `Session.listen` makes it, and `ask` of the session takes it as a question.

    Args:
        session: an `omni.generate.session.Session`, which may be read.
        task: that it is going to be asked as; another is taken, and encoded again where the projector is gated by task.
        turn: have the model's turn head hear where it ends.

    Attributes:
        turn: the turn head's probabilities of its frames; None without one, or where the whole is encoded at once.
    """

    def __init__(self, session: Any, task: Task | str, sample_rate: Any, turn: bool = False) -> None:
        self.task = find_task(task)
        if self.task.question == "text":
            raise UserError(
                f"task {self.task.name} asks in writing, and there is nothing to listen to; use one that asks by speech"
            )
        self.session, self._config = session, session.config
        self._incoming = Incoming(sample_rate, longest(self._config))
        self._pieces = SoundPieces(self._incoming.rate)
        self._lock = threading.RLock()
        self._clip: list[Tensor] = []  # at 16 kHz
        self._asked: Asked | None = None
        self._dropped = False
        encoder = self._config.encoder
        heard = turn and self._config.turn and encoder.chunk_samples is not None
        self.turn = TurnFrames(encoder.frames_per_second) if heard else None
        self._ahead: SoundPieces | None = None  # behind what was peeked at
        self._again = 0  # samples that were peeked at and not pushed
        self._sound = session.open_sound(self.task, self.turn)

    @property
    def seconds(self) -> float:
        """Length of the sound so far."""
        return self._incoming.seconds

    def push(self, piece: Any) -> None:
        """Take the next piece: samples [S] at the sample rate, or of two channels, as a tensor, an array or a list; all of
        one type and one number of channels. It may be empty, and the caller may use its memory again. Waits for nobody.
        UserError: it is no sound, of another kind than those before, not finite, too loud, or makes the question too long
        (nothing of it is taken then); the sound was dropped or asked before; the session or the engine is closed."""
        with self._lock:
            self._check_open()
            if not self._incoming.withdrawn:
                self.session.check()
            scaled = self._incoming.add(piece)
            if self._sound is not None and scaled.size:
                self._give(self._pieces.push(scaled))
                self._again = max(self._again - scaled.shape[-1], 0)
                self._ahead = self._ahead if self._again else None

    def peek(self, piece: Any) -> None:
        """Have the turn head hear samples [S] that follow, and may not belong to the question, such as the silence behind it.
        Where they do, push them too. Without a turn head nothing is done; raises as `push`."""
        with self._lock:
            self._check_open()
            if self.turn is None:
                return
            self.session.check()
            scaled = as_piece(piece, "the sound", self._incoming.check_room)[1]
            self._ahead = self._ahead or self._pieces.copy()
            self._again += scaled.shape[-1]
            self.session.hear(self._sound, self._ahead.push(scaled), peek=True)

    def _give(self, samples: Tensor) -> None:
        self._clip.append(samples)
        self.session.hear(self._sound, samples)

    def _check_open(self) -> None:
        if self._dropped or self._asked is not None:
            state = "dropped" if self._dropped else "asked"
            raise UserError(f"this sound was {state}, and takes no more pieces; listen to another")

    def drop(self) -> None:
        """Forget the sound: it was no question. The history has nothing of it, and the cache is cut by the next question."""
        self._dropped = True
        self.session.drop_sound(self._sound)
        self._clip, self._asked = [], None

    def __del__(self) -> None:
        if getattr(self, "_sound", None) is not None and self._asked is None:
            self.session.drop_sound(self._sound)  # nobody has it any more

    def withdraw(self) -> None:
        """Take no more of an iterator, whose answer was cancelled: the next piece raises `Withdrawn`."""
        self._incoming.withdrawn = True
        self.session.drop_sound(self._sound)

    def take(self, pieces: Iterator[Any]) -> None:
        """Push all pieces of an iterator, which is closed where they are not taken to its end."""
        take_all(pieces, self.push)
        self._incoming.check()

    async def take_async(self, pieces: AsyncIterable[Any]) -> None:
        """`take` of an asynchronous iterator."""
        iterator = aiter(pieces)
        try:
            async for piece in iterator:
                self.push(piece)
        finally:
            if hasattr(iterator, "aclose"):
                await iterator.aclose()
        self._incoming.check()

    def so_far(self) -> AudioSoFar:
        """What has been heard by now, as a question for another session of the same engine: `other.ask(listening.so_far(),
        "A1T1")`. Nothing is encoded for it, and what the other session has been asked of this sound before is not fed again."""
        return AudioSoFar(self)

    def known(self, task: Task) -> Asked:
        """The question that `so_far` is. UserError: nothing was heard by now, or the projector is gated by task."""
        with self._lock:
            self._check_open()
            if self._sound is None:
                raise UserError("this encoder hears whole questions only, and nothing is known of this one; ask its sound")
            if task.question == "text":
                raise UserError(f"task {task.name} asks in writing, but the question is sound; ask by speech")
            if task.name != self.task.name and self._config.projector.kind in SHARING:
                raise UserError(f"the projector is gated by task, and this sound is heard for {self.task.name}; ask its sound")
            return Asked(Turn(task), None, heard=self.session.sound_so_far(self._sound))

    def asked(self, session: Any, task: Task) -> Asked:
        """The question that the sound is; more is not taken afterwards. UserError: there was no sound, it was dropped, it is
        another session's, or it is asked in writing."""
        with self._lock:
            if session is not self.session:
                raise UserError("this sound was listened to by another session; ask it there")
            if task.question == "text":
                raise UserError(f"task {task.name} asks in writing, but the question is sound; ask by speech")
            if self._dropped:
                self._check_open()
            if self._asked is None:
                self._asked = self._ended(task)
            asked = self._asked
            if task.name == self.task.name or self._config.projector.kind not in SHARING:
                return replace(asked, turn=replace(asked.turn, task=task))
            self.session.drop_sound(self._sound)
            return replace(asked, turn=replace(asked.turn, task=task), heard=None)

    def _ended(self, task: Task) -> Asked:
        incoming = self._incoming
        incoming.check()
        rest = None if self._sound is None else self._pieces.finish()
        if rest is None:  # the whole is read at once
            self.session.drop_sound(self._sound)
            asked: Asked = self.session._read_question(incoming.whole(), task, incoming.rate)
            return asked
        self._give(rest)
        clip, self._clip = torch.cat(self._clip), []
        incoming.forget()
        return replace(asked_by_clip(clip, task, self._config), heard=self._sound)


@dataclass(frozen=True)
class AudioSoFar:
    """A sound that is still coming, as far as it was heard when it is asked."""

    listening: Listening


TellTurn = Callable[[int, Tensor], None]
"""Is told the turn head's probabilities [T, 2] of the frames from a number on."""


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
        ahead = self._ahead
        reached = self._taken if ahead is None else max(ahead.taken, self._taken)  # samples encoded, peeked ones included
        return self._came - self._taken >= self.size or self._came + self._beyond - reached >= self.size

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
        model, active = self._model, active_of(self._model)
        under = active.edits, active.changes, model.device
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
