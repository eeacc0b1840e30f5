"""What is asked: sound files (also on standard input), raw PCM on standard input, or texts.

What comes through a pipe is known by its first bytes: a sound file is decoded as what it is, text and other files are
refused by name, and the rest is raw PCM. All of it is read and checked before the model is loaded, except standard
input: it is drained in the background from the start, so that a recorder that writes into the pipe is never held up, and
the question has ended when the pipe ends.

Dimensions: S samples.
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from torch import Tensor

from infer.given import SOUND, TEXT
from infer.places import PIPE
from omni.audio.io import (
    MAX_SECONDS,
    MAX_STREAM_BYTES,
    SAMPLE_RATE,
    AudioSource,
    audio_info,
    from_pcm16,
    read_audio,
    read_stream,
    shorten,
)
from omni.audio.sniff import HEAD, container, foreign
from omni.errors import SoundWarning, UserError


@dataclass(frozen=True)
class Pending:
    """One question, which may still be coming in.

    Attributes:
        name: the file, `-`, or the text.
        spoken: it is sound.
        take: the text, or the sound [S] at 16 kHz; waits until the question has ended.
        remarks: what was found doubtful about the sound when it was read.
    """

    name: str
    take: Callable[[], str | Tensor]
    spoken: bool = True
    remarks: tuple[str, ...] = ()


@contextmanager
def remarked() -> Iterator[list[str]]:
    """Gather what is told as a `SoundWarning` meanwhile, each once; other warnings go their way afterwards."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SoundWarning)
        yield found
    for warning in caught:
        if not issubclass(warning.category, SoundWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in found:
            found.append(str(warning.message))


class PipeReader:
    """Drains raw PCM (s16le, mono, at `rate`) or a sound file from a pipe in the background.

    Half an hour of PCM is the most, or `MAX_STREAM_BYTES` of a file; then no more is read.
    """

    def __init__(self, pipe: BinaryIO, rate: int, channel: int | None = None) -> None:
        self._read, self._rate, self._channel = _reader(pipe), rate, channel
        self._limit = min(int(MAX_SECONDS * rate * 2), MAX_STREAM_BYTES)
        self._kind: str | None = None
        self._data = bytearray()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while len(self._data) <= self._limit and (block := self._read(1 << 14)):
                begins = len(self._data) < HEAD
                self._data += block
                if begins and len(self._data) >= HEAD:
                    self._look()
        except OSError as error:
            self._error = error
        if len(self._data) < HEAD:
            self._look()

    def _look(self) -> None:
        self._kind = container(bytes(self._data[:HEAD]))
        if self._kind is not None:
            self._limit = MAX_STREAM_BYTES

    def take(self) -> Tensor:
        """The sound [S] at 16 kHz, when the pipe has ended. UserError: nothing came, half a sample, no sound, or no end."""
        self._thread.join()
        if self._error is not None:
            raise UserError(f"standard input cannot be read ({self._error}); pipe raw PCM or a sound file into it")
        if len(self._data) > self._limit:
            most = f"{MAX_SECONDS:g} s" if self._kind is None else f"{MAX_STREAM_BYTES >> 20} MiB"
            raise UserError(f"standard input goes on after {most}, the most that is read; ask in smaller pieces")
        if not self._data:
            raise UserError("standard input ended without a sample; pipe raw PCM (s16le, mono) or a sound file into it")
        data = bytes(self._data)
        if self._kind is not None:
            return _read(data, "standard input", self._channel)
        if (other := foreign(data[:HEAD])) is not None:
            raise UserError(f"standard input is not sound but {other}; pipe raw PCM (s16le, mono) or a sound file into it")
        return from_pcm16(data, self._rate)


def _reader(pipe: BinaryIO) -> Callable[[int], bytes]:
    """How to read some bytes of a stream: past Python's buffer where there is a file descriptor, because a thread
    that waits inside the buffer holds its lock, and the process could not end."""
    try:
        number = pipe.fileno()
    except (OSError, AttributeError):
        return pipe.read
    return lambda size: os.read(number, size)


def read_file(path: str, channel: int | None = None) -> Tensor:
    """A sound file, pipe or device as [S] at 16 kHz; UserError with a way out that this command line has."""
    name = shorten(path)
    return _read(_source(path, name), name, channel)


def _read(source: AudioSource, name: str, channel: int | None) -> Tensor:
    info = audio_info(source, name=name)
    if info.seconds > MAX_SECONDS:
        raise UserError(f"{name} lasts {info.seconds:.0f} s, and the limit is {MAX_SECONDS:g} s; cut it into pieces")
    if channel is None and info.channels > 2:
        raise UserError(
            f"{name} has {info.channels} channels, and only one or two are mixed; choose one with --channel 0 to "
            f"--channel {info.channels - 1}"
        )
    return read_audio(source, channel="mix" if channel is None else channel, name=name)


def _source(path: str, name: str) -> str | bytearray:
    """The path, or where that can be read only once (a named pipe, the shell's `<(...)`) all that comes out of it."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return path
        with open(path, "rb", buffering=HEAD) as pipe:
            return read_stream(pipe, name)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror or error}); name a sound file") from error
    except UserError:
        raise
    except ValueError:  # no name that a file can have, which is said where it is opened
        return path


def collect(
    files: Sequence[str],
    texts: Sequence[str],
    stdin: BinaryIO,
    rate: int = SAMPLE_RATE,
    channel: int | None = None,
    order: str = "",
) -> list[Pending]:
    """The questions in order. `infer.checks` has looked at what was given. UserError: a bad file.

    Args:
        order: the kind of each, `s` for sound and `t` for text; by default the files come first.
    """
    written = iter([Pending(text, lambda text=text: text, spoken=False) for text in texts])  # type: ignore[misc]
    pipe = PipeReader(stdin, rate, channel) if PIPE in files else None
    spoken = iter([_spoken(name, pipe, channel) for name in files])
    return [next(spoken if kind == SOUND else written) for kind in order or SOUND * len(files) + TEXT * len(texts)]


def _spoken(name: str, pipe: PipeReader | None, channel: int | None) -> Pending:
    if name == PIPE and pipe is not None:
        return Pending(name, pipe.take)
    with remarked() as remarks:
        sound = read_file(name, channel)
    return Pending(name, lambda: sound, remarks=tuple(remarks))
