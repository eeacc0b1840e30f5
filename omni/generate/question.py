"""From what a caller asks with (a text, a waveform or a file) to the ids and the 16 kHz clip of a turn.

Dimensions: S samples, N features of a clip after the adapter, W width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni.audio.encoder_features import collate
from omni.audio.io import SAMPLE_RATE, AudioSource, read_audio, resample
from omni.errors import UserError
from omni.model.speech_model import SpeechModel
from omni.tasks import Task, Turn, find_task, prompt
from omni.text import Tokenizer

LOUDEST = 100.0
"""Largest sample that is taken for sound. Full scale is 1; sound counted in integers (32768) is far beyond, by mistake."""

NOT_HEARD = (
    "the encoder makes features of the question that are not finite numbers: leave out the adapter or the edit that acts on "
    "it, load the model in float32, or fetch the weights again"
)
"""Why a question is refused although its sound is right."""

Question = AudioSource | Tensor
"""A text, a waveform [S], or a sound file: its path, its bytes, or the open file."""


@dataclass(frozen=True)
class Asked:
    """A question as ids and sound: the turn without its answer, and the spoken question [S] at 16 kHz."""

    turn: Turn
    clip: Tensor | None

    @property
    def task(self) -> Task:
        return find_task(self.turn.task)


def read_question(
    question: Question, task: Task | str, model: SpeechModel, tokenizer: Tokenizer, sample_rate: int = SAMPLE_RATE
) -> Asked:
    """Check and read one question.

    Args:
        question: a text where the task asks in writing; else a waveform [S] (floating point, mono, from -1 to 1) or a
            sound file; no sample may be beyond 100 (`LOUDEST`).
        sample_rate: of a waveform, in Hz.

    Raises:
        UserError: the question is not of the task's kind, empty, not finite or beyond `LOUDEST`, or the file cannot be read.
    """
    task = find_task(task)
    if task.question == "text":
        if not isinstance(question, str):
            raise UserError(
                f"task {task.name} asks in writing, but the question is {_kind(question)}; give a text, or ask by speech"
            )
        turn = Turn(task, question=tuple(tokenizer.encode(question)))
        prompt(model.layout, turn)
        return Asked(turn, None)
    if isinstance(question, str) and not os.path.exists(question) and (" " in question or not os.path.splitext(question)[1]):
        raise UserError(
            f"task {task.name} asks by speech, and there is no sound file {question!r}; for a written question use "
            f"task='T1{task.name[2:]}'"
        )
    if isinstance(question, Tensor):
        clip = _waveform(question, sample_rate)
    elif isinstance(question, (str, bytes, os.PathLike)) or hasattr(question, "read"):
        clip = read_audio(question, SAMPLE_RATE)
        check_level(clip)
    else:
        raise UserError(
            f"task {task.name} asks by speech, but the question is {_kind(question)}; give a tensor [S] or a sound file"
        )
    turn = Turn(task, features=model.config.features(len(clip)))
    prompt(model.layout, turn)
    return Asked(turn, clip)


@torch.no_grad()
def encode_questions(model: SpeechModel, asked: Sequence[Asked]) -> list[Tensor | None]:
    """Features [N, W] of each spoken question, None for the written ones; all clips go through the encoder together."""
    clips = [a.clip for a in asked if a.clip is not None]
    if not clips:
        return [None] * len(asked)
    encoder = model.encoder
    windows = [encoder.split(clip) for clip in clips]  # longer sound than the encoder hears at once comes in several
    mels, lengths = collate([encoder.features(window) for clip in windows for window in clip])
    frames = [encoder.frames(len(window)) for clip in windows for window in clip]
    per_clip = [sum(encoder.frames(len(window)) for window in clip) for clip in windows]
    tasks = [a.task.name for a in asked if a.clip is not None]
    features = model.adapter(model.hear(mels.to(model.device), lengths, frames), per_clip, tasks)
    heard = iter(features.split([-(-n // model.config.adapter.stack) for n in per_clip]))
    return [None if a.clip is None else next(heard) for a in asked]


def check_level(clip: Tensor) -> None:
    """Refuse sound with samples that are not finite, or beyond `LOUDEST` (UserError)."""
    loudest = float(torch.stack(torch.aminmax(clip)).abs().max()) if len(clip) else 0.0
    if not math.isfinite(loudest):
        raise UserError("the question holds samples that are not finite numbers; was it divided by a zero level?")
    if loudest > LOUDEST:
        raise UserError(
            f"the question has a sample of {loudest:.4g}, but sound lies between -1 and 1 (at most {LOUDEST:g} is taken); "
            "divide it by its full scale, which is 32768 for samples of 16 bits"
        )


def is_finite(features: Tensor | None) -> bool:
    """Whether a question's features are all finite numbers; waits for the device."""
    return features is None or bool(features.isfinite().all())


def _waveform(samples: Tensor, sample_rate: int) -> Tensor:
    if samples.ndim != 1 or not samples.is_floating_point():
        raise UserError(
            f"the question is a {samples.dtype} tensor of shape {list(samples.shape)}; give mono floating-point samples [S]"
        )
    if len(samples) == 0:
        raise UserError("the question has no samples; give at least some milliseconds of sound")
    if sample_rate < 1:
        raise UserError(f"the question's sample rate is {sample_rate} Hz; it must be positive")
    check_level(samples)  # before resampling, which adds samples up
    return resample(samples.detach().to("cpu", torch.float32), sample_rate, SAMPLE_RATE)


def _kind(question: Any) -> str:
    if isinstance(question, Tensor):
        return f"a waveform of shape {list(question.shape)}"
    return f"a {type(question).__name__}"
