"""Reads questions (a text, sound held in Python, or a file) as the ids and the 16 kHz clip of a turn.

Dimensions: S samples, N features of a clip after the projector, W width.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.audio.io import SAMPLE_RATE, AudioSource, shorten
from omni.audio.level import sound_warnings
from omni.audio.sniff import SUFFIXES
from omni.audio.waveform import read_sound, unwrap
from omni.config import ModelConfig
from omni.encoder.config import PreparedSound
from omni.errors import UserError, warn_about_sound
from omni.generate.feature_stream import FeatureStream, KnownFeatures
from omni.generate.incoming import Incoming, is_coming
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Task, Turn, find_task, prompt
from omni.text import Tokenizer
from omni.utils.remote import refuse_remote

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
    for the encoder, or heard while the sound came (in the engine's process where that is another; then its number there), or
    what is known of one that is still coming (there by the numbers of its session and of itself)."""

    turn: Turn
    clip: Tensor | None
    prepared: PreparedSound | None = None
    heard: FeatureStream | KnownFeatures | tuple[int, int] | int | None = None

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
    """Check and read one question.

    Args:
        question: see `Question` and `Coming`.
        sample_rate: of samples that come without their own, in Hz.

    Raises:
        UserError: the question is not of the task's kind, empty, too long, not finite, too loud, or its file cannot be read.
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
