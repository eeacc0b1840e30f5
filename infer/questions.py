"""What is asked: sound files, raw PCM on standard input, or texts.

All of it is read and checked before the model is loaded, except standard input: it is drained in the background
from the start, so that a recorder that writes into the pipe is never held up, and the question has ended when the
pipe ends.

Dimensions: S samples.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from torch import Tensor

from infer.checks import PIPE
from omni.audio.io import MAX_SECONDS, SAMPLE_RATE, audio_info, from_pcm16, read_audio
from omni.errors import UserError
from omni.tasks import Task, find_task


@dataclass(frozen=True)
class Pending:
    """One question, which may still be coming in.

    Attributes:
        name: the file, `-`, or the text.
        take: the text, or the sound [S] at 16 kHz; waits until the question has ended.
    """

    name: str
    take: Callable[[], str | Tensor]


class PipeReader:
    """Drains raw PCM (s16le, mono) from a pipe in the background."""

    def __init__(self, pipe: BinaryIO, rate: int) -> None:
        self._read, self._rate = _reader(pipe), rate
        self._limit = int(MAX_SECONDS * rate * 2)
        self._data = bytearray()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while len(self._data) <= self._limit and (block := self._read(1 << 14)):
                self._data += block
        except OSError as error:
            self._error = error

    def take(self) -> Tensor:
        """The sound [S] at 16 kHz, when the pipe has ended. UserError: nothing came, half a sample, or no end."""
        self._thread.join()
        if self._error is not None:
            raise UserError(f"standard input cannot be read ({self._error}); pipe raw PCM into it")
        if len(self._data) > self._limit:
            raise UserError(f"standard input goes on after {MAX_SECONDS:g} s; ask in smaller pieces")
        if not self._data:
            raise UserError("standard input ended without a sample; pipe raw PCM (s16le, mono) into it")
        return from_pcm16(bytes(self._data), self._rate)


def _reader(pipe: BinaryIO) -> Callable[[int], bytes]:
    """How to read some bytes of a stream: past Python's buffer where there is a file descriptor, because a thread
    that waits inside the buffer holds its lock, and the process could not end."""
    try:
        number = pipe.fileno()
    except (OSError, AttributeError):
        return pipe.read
    return lambda size: os.read(number, size)


def read_file(path: str, channel: int | None = None) -> Tensor:
    """A sound file as [S] at 16 kHz; UserError with a way out that this command line has."""
    source = _source(path)
    info = audio_info(source)
    if info.seconds > MAX_SECONDS:
        raise UserError(f"{path!r} lasts {info.seconds:.0f} s, and the limit is {MAX_SECONDS:g} s; cut it into pieces")
    if channel is None and info.channels > 2:
        raise UserError(
            f"{path!r} has {info.channels} channels, and only one or two are mixed; choose one with --channel 0 to "
            f"--channel {info.channels - 1}"
        )
    return read_audio(source, channel="mix" if channel is None else channel)


def _source(path: str) -> str | bytes:
    """The path, or where that can be read only once (a named pipe, the shell's `<(...)`) all that comes out of it."""
    if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):
        return path
    try:
        with open(path, "rb") as pipe:
            return pipe.read()
    except OSError as error:
        raise UserError(f"{path!r} cannot be read ({error.strerror or error}); name a sound file") from error


def collect(
    files: Sequence[str],
    texts: Sequence[str],
    stdin: BinaryIO,
    rate: int = SAMPLE_RATE,
    channel: int | None = None,
) -> list[Pending]:
    """The questions in order (`infer.checks` has looked at what was given). UserError: a bad file."""
    if texts:
        return [Pending(text, lambda text=text: text) for text in texts]  # type: ignore[misc]
    pipe = PipeReader(stdin, rate) if PIPE in files else None
    asked = []
    for name in files:
        if name == PIPE and pipe is not None:
            asked.append(Pending(name, pipe.take))
        else:
            sound = read_file(name, channel)
            asked.append(Pending(name, lambda sound=sound: sound))  # type: ignore[misc]
    return asked


def choose_task(name: str | None, spoken: bool) -> Task:
    """The task of that name, or the one that answers such questions in text and speech; UserError where it does not
    fit."""
    task = find_task(name or ("A1A2" if spoken else "T1A2"))
    if (task.question == "audio") != spoken:
        given, use = ("sound was given", "--text") if spoken else ("--text was given", "a sound file")
        raise UserError(f"--task {task.name} asks by {task.question}, but {given}; choose another task, or give {use}")
    return task
