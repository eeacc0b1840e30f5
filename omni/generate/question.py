"""Reads questions (a text, sound held in Python, a file, or pieces that are still coming) as the ids and the 16 kHz clip of a
turn.

    listening = session.listen(sample_rate=24_000)
    listening.push(samples)                            # as they come
    for event in session.ask(listening): ...           # or listening.drop()

What is wrong with a piece is said when it comes, and a sound that is too long is refused as soon as it is. What has come is
heard at once where the encoder hears in chunks (`omni.generate.listening`); else it is gathered, and encoded when it is asked.

Dimensions: S samples, N features of a clip after the projector, W width.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.audio.decode import SUFFIXES
from omni.audio.io import SAMPLE_RATE, AudioSource, shorten, sound_warnings
from omni.audio.waveform import SoundPieces, as_piece, is_waveform, read_sound, unwrap, whole_rate
from omni.config import ModelConfig
from omni.encoder.config import PreparedSound
from omni.errors import UserError, warn_about_sound
from omni.generate.listening import TurnFrames
from omni.model.multitask_projector import SHARING
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Task, Turn, find_task, prompt
from omni.text import Tokenizer
from omni.utils.remote import refuse_remote


class Withdrawn(Exception):
    """The answer was cancelled before its question was whole."""


def is_coming(question: Any) -> bool:
    """Whether a question is an iterator of pieces, or an asynchronous one; an open file, which is one of lines, is not."""
    if is_waveform(question) or isinstance(question, (str, bytes, os.PathLike)) or hasattr(question, "read"):
        return False
    return isinstance(question, (Iterator, AsyncIterable))


class Incoming:
    """Gathers the pieces of one question. UserError: a sample rate that is none.

    Args:
        sample_rate: of the pieces, in Hz.
        most: seconds of the longest question.

    Attributes:
        withdrawn: its answer was cancelled; nothing more is taken.
        pieces, samples: those that were taken, and their length.
    """

    def __init__(self, sample_rate: Any, most: float) -> None:
        self.rate, self.most = whole_rate(sample_rate), most
        self.withdrawn = False
        self.pieces: list[np.ndarray] = []
        self._count = self.samples = 0
        self._two: int | None = None  # dimension of the pieces that has two channels
        self._form = ""  # type and channels of the pieces, in words

    def add(self, piece: Any) -> np.ndarray:
        """Take the next piece: samples [S], or of two channels, as a tensor, an array or a list; the caller may use its
        memory again. Returns it as float32, full scale being 1, [S] or [2, S]. UserError: it is no sound, of another kind
        than those before, not finite, too loud, or makes the sound too long; it names the piece, counted from 1. Withdrawn:
        the answer was cancelled meanwhile."""
        if self.withdrawn:
            raise Withdrawn
        self._count += 1
        name = f"piece {self._count} of the question"
        array, scaled = as_piece(piece, name, self.check_room, self._two)
        if not array.size:
            return scaled.reshape(-1)
        dtype = "floating-point numbers" if array.dtype.kind == "f" else str(array.dtype)
        form = f"{dtype} of {'two channels' if array.ndim == 2 else 'one channel'}"
        if self.pieces and form != self._form:
            raise UserError(f"{name} is {form}, and those before are {self._form}; give all in one form")
        if not self.pieces and array.ndim == 2:
            self._two = int(np.shape(piece)[0] != 2)
        self._form = form
        self.pieces.append(array)
        self.samples += array.shape[-1]
        return scaled

    def check_room(self, samples: int) -> None:
        """UserError where so many samples more are too many."""
        if (samples := self.samples + samples) > self.most * self.rate:
            raise UserError(
                f"the question lasts {samples / self.rate:.8g} s by its piece {self._count}, and at most {self.most:g} s are "
                f"taken; end it before, or correct the sample rate, {self.rate} Hz"
            )

    def check(self) -> None:
        """UserError where there was no sound, Withdrawn where the answer was cancelled."""
        if self.withdrawn:
            raise Withdrawn
        if not self.pieces:
            problem = "ended without a piece of sound" if not self._count else f"gave {self._count} pieces without samples"
            raise UserError(f"the question {problem}; give at least some milliseconds of sound")

    def whole(self) -> np.ndarray:
        """All pieces as one sound, [S] or [2, S]; raises as `check`."""
        self.check()
        return np.concatenate(self.pieces, axis=-1)


def take_all(pieces: Iterator[Any], take: Callable[[Any], object]) -> None:
    """Give all pieces of an iterator to a function; the iterator is closed where they are not taken to its end."""
    try:
        for piece in pieces:
            take(piece)
    finally:
        getattr(pieces, "close", lambda: None)()


FEATURES_NOT_FINITE = (
    "the encoder makes features of the question that are not finite numbers: leave out the adapter or the edit that acts on "
    "it, load the model in float32, or fetch the weights again"
)
"""Text of the error for features that are not finite although the sound is."""

Question = AudioSource | Tensor | np.ndarray | Sequence[Any] | Mapping[str, Any]
"""Accepted questions: a text where the task asks in writing; where it asks by speech,

- a sound file: its path, its bytes, or the open binary file (WAV, FLAC, OGG, MP3, AIFF, AU, CAF), which knows its own rate;
- samples at `sample_rate` of the call: a tensor, a NumPy array, or a list of numbers, of shape [S], [1, S] or [S, 1], or of two
  channels, [2, S] or [S, 2], which are mixed as those of files are. Floating-point numbers have full scale 1; integers are
  divided by the range of their type (int8, uint8 around 128, int16, int32), and whole numbers in a list, or int64, count as
  16-bit samples;
- samples with their own rate, which comes before `sample_rate`: `(rate, samples)` or `(samples, rate)`,
  `{"array": samples, "sampling_rate": rate}`;
- a row of a data set: one of these under `"audio"`, or `{"bytes": ..., "path": ...}` of a file.

Any rate is resampled to 16 kHz. A question lasts at most `longest(config)` seconds. Under 100 ms, or with no 100 ms above
-60 dBFS (RMS), it is answered with a `SoundWarning`; so is one whose channels cancel each other, or whose file may be cut.
"""


Coming = Iterator[Any]
"""Sound that is still coming: its pieces, samples at `sample_rate` of the call, all of one type and one number of channels, as
tensors, arrays or lists. A piece may be empty. Generators are closed where they are not read to their end."""


def longest(config: ModelConfig) -> float:
    """Seconds of the longest question: the encoder's window, or, where it splits longer sound, the length that fills the
    decoder's context."""
    encoder = config.encoder
    if encoder.long_audio == "refuse":
        return encoder.window_seconds
    return config.decoder.context * config.projector.stack / encoder.frames_per_second


@dataclass(frozen=True)
class Asked:
    """A question as ids and sound: the turn without its answer, the spoken question [S] at 16 kHz, and what was prepared of it
    for the encoder; of sound that is heard while it comes, its number in the engine, or where it is still coming the numbers of
    its session and of itself."""

    turn: Turn
    clip: Tensor | None
    prepared: PreparedSound | None = None
    heard: tuple[int, int] | int | None = None

    @property
    def task(self) -> Task:
        return find_task(self.turn.task)

    def after(self, system: Sequence[int]) -> Asked:
        """This question with a system message of these ids before it."""
        return replace(self, turn=replace(self.turn, system=tuple(system)))


def several(question: Any) -> bool:
    """Whether it is a list of questions: one of numbers, or of rows of numbers, is sound."""
    if not isinstance(question, list):
        return False
    first = question[0] if question else None
    row = first[:2] if isinstance(first, (list, tuple)) else [first]
    return not all(isinstance(value, Number) for value in row)


def read_question(
    question: Question | Coming, task: Task | str, config: ModelConfig, tokenizer: Tokenizer, sample_rate: int = SAMPLE_RATE
) -> Asked:
    """Check and read one question. UserError: the question is not of the task's kind, empty, too long, not finite, too loud, or
    its file cannot be read.

    Args:
        question: see `Question` and `Coming`.
        sample_rate: of samples that come without their own, in Hz.
    """
    task = find_task(task)
    if task.question == "text":
        if not isinstance(question, str):
            kind = f"waveform of shape {list(question.shape)}" if isinstance(question, Tensor) else type(question).__name__
            raise UserError(f"task {task.name} asks in writing, but the question is a {kind}; give a text, or ask by speech")
        if (os.path.splitext(question)[1].lower() in SUFFIXES and " " not in question) or os.path.isfile(question):
            spoken = f"A1{task.name[2:]}"
            way = f"to ask its sound use task={spoken!r}" if spoken in TASKS else "leave it so, or ask its sound"
            said = f"the question {shorten(question)} is the name of a file, but task {task.name} asks it as a text; {way}"
            warn_about_sound(said)
        turn = Turn(task, question=tuple(tokenizer.encode(question, config.decoder.context)))
        prompt(config.layout, turn)
        return Asked(turn, None)
    if isinstance(question, AsyncIterable):
        raise UserError(f"the question is a {type(question).__name__}, an asynchronous iterator; ask it by `async for`")
    if isinstance(question, Iterator) and is_coming(question):
        incoming = Incoming(sample_rate, longest(config))
        take_all(question, incoming.add)
        question = incoming.whole()
    sound, rate = unwrap(question, sample_rate)
    if isinstance(sound, str):
        refuse_remote(sound, "sound file")
    if isinstance(sound, str) and not os.path.exists(sound) and (" " in sound or not os.path.splitext(sound)[1]):
        written = f"T1{task.name[2:]}"
        way = f"for a written question use task={written!r}" if written in TASKS else "check its path"
        raise UserError(f"task {task.name} asks by speech, and there is no sound file {shorten(sound)}; {way}")
    clip = read_sound(sound, rate, max_seconds=longest(config))
    name = shorten(os.fspath(sound)) if isinstance(sound, (str, os.PathLike)) else "the question"
    return asked_by_clip(clip, task, config, name)


def asked_by_clip(clip: Tensor, task: Task, config: ModelConfig, name: str = "the question") -> Asked:
    """A spoken question [S] at 16 kHz; UserError where the model does not take it."""
    for remark in sound_warnings(clip, SAMPLE_RATE):
        warn_about_sound(f"{name} {remark}")
    turn = Turn(task, features=config.features(len(clip)))
    prompt(config.layout, turn)
    return Asked(turn, clip)


def read_system(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a system message, the same in training and serving; none for a text of spaces alone."""
    return tuple(tokenizer.encode(text.strip()))


@torch.no_grad()
def encode_questions(model: SpeechModel, asked: Sequence[Asked]) -> list[Tensor | None]:
    """Features [N, W] of each spoken question, None for the written ones; all clips go through the encoder together. Of a head
    `tokens` they are as many as it reads."""
    clips = [a.clip if a.prepared is None else a.prepared for a in asked if a.clip is not None]
    if not clips:
        return [None] * len(asked)
    frames, per_clip = model.encoder.encode(clips)
    names = [a.task.name for a in asked if a.clip is not None]
    heard = iter(model.hear(model.projector(frames, per_clip, names), per_clip))
    return [None if a.clip is None else next(heard) for a in asked]


def is_finite(features: Tensor | None) -> bool:
    """Whether a question's features are all finite numbers; waits for the device."""
    return features is None or bool(features.isfinite().all())


# --- sound that is still coming ---------------------------------------------------------------------------------------


class Listening:
    """The sound of one question; `Session.listen` makes it, and `ask` of the session takes it as a question.

    Args:
        session: an `omni.generate.session.Session`.
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
        return self._incoming.samples / self._incoming.rate

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
                self._clip.append(self._pieces.push(scaled))
                self._tell(self._clip[-1])
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
            self._tell(self._ahead.push(scaled), peek=True)

    def _tell(self, samples: Tensor, peek: bool = False) -> None:
        """Have the engine hear samples [S] at 16 kHz; it passes over those of a sound that the session listens to no more."""
        self.session.link.tell("hear", self.session.number, self._sound, samples, peek)

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
            with suppress(UserError):  # of a closed session
                self.session.drop_sound(self._sound)  # nobody has it any more

    def withdraw(self) -> None:
        """Take no more of an iterator, whose answer was cancelled: the next piece raises `Withdrawn`."""
        self._incoming.withdrawn = True
        self.session.drop_sound(self._sound)

    def take(self, pieces: Iterator[Any]) -> None:
        """Push all pieces of an iterator, which is closed where they are not taken to its end."""
        try:
            take_all(pieces, self.push)
        finally:
            self.session.end_reading(self)
        self._incoming.check()

    async def take_async(self, pieces: AsyncIterable[Any]) -> None:
        """`take` of an asynchronous iterator."""
        iterator = aiter(pieces)
        try:
            async for piece in iterator:
                self.push(piece)
        finally:
            self.session.end_reading(self)
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
            if task.name != self.task.name and self._config.projector.kind in SHARING:
                raise UserError(f"the projector is gated by task, and this sound is heard for {self.task.name}; ask its sound")
            return Asked(Turn(task), None, heard=(self.session.number, self._sound))

    def asked(self, session: Any, task: Task) -> Asked:
        """The question that the sound is; more is not taken afterwards. UserError: there was no sound, it was dropped, it is
        another session's."""
        with self._lock:
            if session is not self.session:
                raise UserError("this sound was listened to by another session; ask it there")
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
            return read_question(incoming.whole(), task, self._config, self.session.tokenizer, incoming.rate)
        self._tell(rest)
        clip, self._clip = torch.cat([*self._clip, rest]), []
        incoming.pieces = []
        return replace(asked_by_clip(clip, task, self._config), heard=self._sound)


@dataclass(frozen=True)
class AudioSoFar:
    """A sound that is still coming, as far as it was heard when it is asked."""

    listening: Listening
