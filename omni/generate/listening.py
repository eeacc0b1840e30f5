"""A question that is heard while its sound comes.

    listening = session.listen(sample_rate=24_000)
    listening.push(samples)                            # as they come
    for event in session.ask(listening): ...           # or listening.drop()

Where the encoder hears in chunks (`EncoderConfig.chunk_samples`), each is encoded and prefilled as soon as it is full, in time
that the engine does not need for others, so that at the question's end only the last is left. With other encoders the sound is
gathered, and encoded when it is asked.

S samples of a piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from omni.audio.waveform import SoundPieces, as_piece
from omni.errors import UserError
from omni.generate.question import Asked, Incoming, asked_by_clip, longest, take_all, take_all_async
from omni.generate.turn_end import TurnFrames
from omni.model.multitask_projector import SHARING
from omni.tasks import Task, Turn, find_task

LOG = logging.getLogger(__name__)


@lru_cache(maxsize=32)
def _tell_whole(encoder: str) -> None:
    """Say once that an encoder gains nothing by listening."""
    LOG.info("this encoder (%s) hears whole questions only: what is listened to is encoded when it has ended", encoder)


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
        if encoder.chunk_samples is None:
            _tell_whole(encoder.kind)
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
        await take_all_async(pieces, self.push)
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
