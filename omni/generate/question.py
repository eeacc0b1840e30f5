"""Reads questions (a text, sound held in Python, a file, or pieces that are still coming) as the ids and the 16 kHz clip of a
turn.

What is wrong with a piece is said when it comes, and a sound that is too long is refused as soon as it is.

Dimensions: S samples, N features of a clip after the projector, W width.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.audio.decode import SUFFIXES
from omni.audio.io import SAMPLE_RATE, AudioSource, shorten, sound_warnings
from omni.audio.waveform import as_piece, is_waveform, read_sound, unwrap, whole_rate
from omni.config import ModelConfig
from omni.encoder.config import PreparedSound
from omni.errors import UserError, warn_about_sound
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
    """

    def __init__(self, sample_rate: Any, most: float) -> None:
        self.rate, self.most = whole_rate(sample_rate), most
        self.withdrawn = False
        self._pieces: list[np.ndarray] = []
        self._count = self._samples = 0
        self._two: int | None = None  # dimension of the pieces that has two channels

    @property
    def seconds(self) -> float:
        """Length of the sound so far."""
        return self._samples / self.rate

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
        if self._pieces and _form(array) != _form(self._pieces[0]):
            raise UserError(f"{name} is {_form(array)}, and those before are {_form(self._pieces[0])}; give all in one form")
        if not self._pieces and array.ndim == 2:
            self._two = int(np.shape(piece)[0] != 2)
        self._pieces.append(array)
        self._samples += array.shape[-1]
        return scaled

    def check_room(self, samples: int) -> None:
        """UserError where so many samples more are too many."""
        if (samples := self._samples + samples) > self.most * self.rate:
            raise UserError(
                f"the question lasts {samples / self.rate:.8g} s by its piece {self._count}, and at most {self.most:g} s are "
                f"taken; end it before, or correct the sample rate, {self.rate} Hz"
            )

    def check(self) -> None:
        """UserError where there was no sound, Withdrawn where the answer was cancelled."""
        if self.withdrawn:
            raise Withdrawn
        if not self._pieces:
            problem = "ended without a piece of sound" if not self._count else f"gave {self._count} pieces without samples"
            raise UserError(f"the question {problem}; give at least some milliseconds of sound")

    def forget(self) -> None:
        """Free the pieces."""
        self._pieces = []

    def whole(self) -> np.ndarray:
        """All pieces as one sound, [S] or [2, S]; raises as `check`."""
        self.check()
        return np.concatenate(self._pieces, axis=-1)

    def gather(self, pieces: Iterator[Any]) -> np.ndarray:
        """Take all pieces of an iterator, which is closed where they are not taken to its end; returns `whole`."""
        take_all(pieces, self.add)
        return self.whole()


def take_all(pieces: Iterator[Any], take: Callable[[Any], object]) -> None:
    """Give all pieces of an iterator to a function; the iterator is closed where they are not taken to its end."""
    try:
        for piece in pieces:
            take(piece)
    finally:
        getattr(pieces, "close", lambda: None)()


def _form(array: np.ndarray) -> str:
    """Type and channels of samples, in words."""
    dtype = "floating-point numbers" if array.dtype.kind == "f" else str(array.dtype)
    return f"{dtype} of {'two channels' if array.ndim == 2 else 'one channel'}"


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


_SOUNDS = count()


def new_sound() -> int:
    """A number for a spoken question's features, that no other of this process has."""
    return next(_SOUNDS)


@dataclass(frozen=True)
class KnownFeatures:
    """Features [N, W] so far of a question that is still coming, and the number by which its stream has them."""

    number: int
    features: Tensor


@dataclass(frozen=True)
class Asked:
    """A question as ids and sound: the turn without its answer, the spoken question [S] at 16 kHz, and what was prepared of it
    for the encoder; of sound that is heard while it comes, its number in the engine, or where it is still coming the numbers of
    its session and of itself, and then, there, what is known of it."""

    turn: Turn
    clip: Tensor | None
    prepared: PreparedSound | None = None
    heard: KnownFeatures | tuple[int, int] | int | None = None

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
    question: Question | Coming, task: Task | str, model: SpeechModel, tokenizer: Tokenizer, sample_rate: int = SAMPLE_RATE
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
            raise UserError(
                f"task {task.name} asks in writing, but the question is {_kind(question)}; give a text, or ask by speech"
            )
        if (os.path.splitext(question)[1].lower() in SUFFIXES and " " not in question) or os.path.isfile(question):
            spoken = f"A1{task.name[2:]}"
            way = f"to ask its sound use task={spoken!r}" if spoken in TASKS else "leave it so, or ask its sound"
            said = f"the question {shorten(question)} is the name of a file, but task {task.name} asks it as a text; {way}"
            warn_about_sound(said)
        turn = Turn(task, question=tuple(tokenizer.encode(question, model.config.decoder.context)))
        prompt(model.layout, turn)
        return Asked(turn, None)
    if isinstance(question, AsyncIterable):
        raise UserError(f"the question is {_kind(question)}, an asynchronous iterator; ask it by `async for`")
    if isinstance(question, Iterator) and is_coming(question):
        question = Incoming(sample_rate, longest(model.config)).gather(question)
    sound, rate = unwrap(question, sample_rate)
    if isinstance(sound, str):
        refuse_remote(sound, "sound file")
    if isinstance(sound, str) and not os.path.exists(sound) and (" " in sound or not os.path.splitext(sound)[1]):
        written = f"T1{task.name[2:]}"
        way = f"for a written question use task={written!r}" if written in TASKS else "check its path"
        raise UserError(f"task {task.name} asks by speech, and there is no sound file {shorten(sound)}; {way}")
    clip = read_sound(sound, rate, max_seconds=longest(model.config))
    name = shorten(os.fspath(sound)) if isinstance(sound, (str, os.PathLike)) else "the question"
    return asked_by_clip(clip, task, model.config, name)


def asked_by_clip(clip: Tensor, task: Task, config: ModelConfig, name: str = "the question") -> Asked:
    """A spoken question [S] at 16 kHz; UserError where the model does not take it."""
    for remark in sound_warnings(clip, SAMPLE_RATE):
        warn_about_sound(f"{name} {remark}")
    turn = Turn(task, features=config.features(len(clip)))
    prompt(config.layout, turn)
    return Asked(turn, clip)


def read_system(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of a system message, the same in training and serving; none for a text of spaces alone."""
    if not isinstance(text, str):
        raise UserError(f"system is {text!r}; give a text, or an empty one for none")
    return tuple(tokenizer.encode(text.strip()))


@torch.no_grad()
def encode_questions(model: SpeechModel, asked: Sequence[Asked]) -> list[Tensor | None]:
    """Features [N, W] of each spoken question, None for the written ones; all clips go through the encoder together."""
    clips = [a.clip if a.prepared is None else a.prepared for a in asked if a.clip is not None]
    if not clips:
        return [None] * len(asked)
    frames, per_clip = model.encoder.encode(clips)
    features = model.projector(frames, per_clip, [a.task.name for a in asked if a.clip is not None])
    heard = iter(features.split([-(-n // model.config.projector.stack) for n in per_clip]))
    return [None if a.clip is None else next(heard) for a in asked]


def is_finite(features: Tensor | None) -> bool:
    """Whether a question's features are all finite numbers; waits for the device."""
    return features is None or bool(features.isfinite().all())


def _kind(question: Any) -> str:
    if isinstance(question, Tensor):
        return f"a waveform of shape {list(question.shape)}"
    return f"a {type(question).__name__}"
