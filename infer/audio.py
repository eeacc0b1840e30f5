"""Questions in and answers out: reads sound files, standard input and texts, and writes the answer's sound while it is made.

Data from a pipe is identified by its first bytes: a sound file is decoded by its format, text and other files are
refused by name, and the rest is raw PCM. Everything is read and checked before the model is loaded, except standard
input: it is drained in the background from the start, so that a recorder that writes into the pipe is never blocked, and
the question has ended when the pipe ends. Raw PCM and WAV are heard while they come, where the model's encoder hears in chunks.

S samples.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

from infer.chat.devices import load_sounddevice
from infer.checks import PIPE
from infer.options import SOUND, AskOptions
from omni.audio.decode import HEAD, container, foreign
from omni.audio.io import MAX_SECONDS, MAX_STREAM_BYTES, SAMPLE_RATE, from_pcm16, read_audio
from omni.audio.wav import SampleForm, WavWriter, pcm16, wav_form, write_audio
from omni.errors import SoundWarning, UserError
from omni.generate.question import Listening, longest
from omni.generate.session import Session
from omni.tasks import Task

Outcome = Literal["done", "stopped", "failed"]
"""End of an answer: complete, interrupted by the user (sound written so far stays), or failed by an error (nothing stays)."""


@dataclass(frozen=True)
class Pending:
    """One question, which may still be coming in."""

    name: str  # the file, `-`, or the text
    take: Callable[[], str | Tensor]  # returns the text, or the sound [S] at 16 kHz; waits until the question has ended
    spoken: bool = True  # whether it is sound
    sound_warnings: tuple[str, ...] = ()  # warnings about the sound from when it was read
    pipe: PipeReader | None = None  # standard input, where it is that

    def hear(self, session: Session, task: Task) -> str | Tensor | Listening:
        """The question once it has ended; what is still coming is heard meanwhile. UserError as of `take`, or as soon as it is
        longer than the model takes."""
        if self.pipe is None or session.config.encoder.chunk_samples is None:
            return self.take()
        listening = self.pipe.heard(session, task)
        with collect_warnings() as doubts:
            whole = self.take()  # says what is wrong with it
        if listening is not None and not doubts and abs(listening.seconds * SAMPLE_RATE - len(whole)) < 1:
            return listening
        for doubt in doubts:
            warnings.warn(doubt, SoundWarning, stacklevel=2)
        if listening is not None:
            listening.drop()
        return whole


@contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Collects the texts of `SoundWarning`s of a block, each once; other warnings are issued when the block ends."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SoundWarning)
        yield messages
    for warning in caught:
        if not issubclass(warning.category, SoundWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in messages:
            messages.append(str(warning.message))


class PipeReader:
    """Drains raw PCM (s16le, mono, at `rate`) or a sound file from a pipe in the background.

    At most half an hour of PCM, and `MAX_STREAM_BYTES` of PCM or of a file, are read.
    """

    def __init__(self, pipe: BinaryIO, rate: int, channel: int | Literal["mix"] = "mix") -> None:
        self._read, self._rate, self._channel = _reader(pipe), rate, channel
        self._limit = min(int(MAX_SECONDS * rate * 2), MAX_STREAM_BYTES)
        self._container: str | None = None
        self._data = bytearray()
        self._error: Exception | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while len(self._data) <= self._limit and (block := self._read(1 << 14)):
                begins = len(self._data) < HEAD
                self._data += block
                if begins and len(self._data) >= HEAD:
                    self._look()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:  # `take` raises it: nobody catches errors of this thread
            self._error = error
        if len(self._data) < HEAD:
            self._look()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def heard(self, session: Session, task: Task) -> Listening | None:
        """Pushes the samples to a session as they come; returns its listening once the pipe has ended. None for a form that is
        decoded whole, or a mistake that `take` raises. UserError as soon as it is too long."""
        form, listening = self._form(), None
        if form is None:
            return None
        try:
            listening = session.listen(task, sample_rate=form.rate)
            for samples in self._samples(form):
                too_long = listening.seconds + samples.shape[-1] / form.rate > longest(session.config)
                listening.push(samples)
        except BaseException as error:
            if listening is not None:
                listening.drop()
            if not isinstance(error, UserError) or (listening is not None and too_long):
                raise
            return None
        return listening

    def _form(self) -> SampleForm | None:
        """Where its samples are, once that is known; None where they are not read piece by piece."""
        self._wait(HEAD)
        head = bytes(self._data[:HEAD])
        if self._container == "WAV":
            form = wav_form(head)
            chosen = form is not None and (form.channels <= 2 if self._channel == "mix" else self._channel < form.channels)
            return form if chosen else None
        return SampleForm(self._rate) if self._container is None and head and foreign(head) is None else None

    def _wait(self, count: int) -> None:
        """Wait until so many bytes have come, or all."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._data) >= count)

    def _samples(self, form: SampleForm) -> Iterator[np.ndarray]:
        """Its samples as they come: [S], or [2, S] of two channels that are mixed."""
        at = form.start
        while True:
            self._wait(at + form.frame)
            ready = len(self._data) if form.end is None else min(len(self._data), form.end)
            whole = (ready - at) // form.frame * form.frame
            if whole <= 0:
                return
            samples = form.samples(bytes(self._data[at : at + whole]))
            at += whole
            yield samples if samples.ndim == 1 or self._channel == "mix" else samples[self._channel]

    def _look(self) -> None:
        self._container = container(bytes(self._data[:HEAD]))
        if self._container is not None:
            self._limit = MAX_STREAM_BYTES

    def take(self) -> Tensor:
        """The sound [S] at 16 kHz, when the pipe has ended. UserError: nothing came, half a sample, no sound, or no end."""
        self._thread.join()
        if self._error is not None:
            reason = str(self._error) or type(self._error).__name__
            raise UserError(f"standard input cannot be read ({reason}); pipe raw PCM or a sound file into it")
        if len(self._data) > self._limit:
            most = f"{self._limit / (2 * self._rate):g} s" if self._container is None else f"{MAX_STREAM_BYTES >> 20} MiB"
            raise UserError(f"standard input continues after {most}, the most that is read; ask in smaller pieces")
        if not self._data:
            raise UserError("standard input ended without a sample; pipe raw PCM (s16le, mono) or a sound file into it")
        if self._container is not None:
            return read_audio(self._data, channel=self._channel, name="standard input")
        if (other := foreign(bytes(self._data[:HEAD]))) is not None:
            raise UserError(f"standard input is not sound but {other}; pipe raw PCM (s16le, mono) or a sound file into it")
        return from_pcm16(self._data, self._rate)


def _reader(pipe: BinaryIO) -> Callable[[int], bytes]:
    """A function that reads some bytes of a stream. It bypasses Python's buffer where there is a file descriptor, because a
    thread that waits inside the buffer holds its lock, and the process could not end."""
    try:
        number = pipe.fileno()
    except (OSError, AttributeError):
        return pipe.read
    return lambda size: os.read(number, size)


def collect(options: AskOptions, stdin: BinaryIO) -> list[Pending]:
    """Reads the questions in order; `infer.checks` has checked the options before. UserError: a bad file."""
    channel: int | Literal["mix"] = "mix" if options.channel is None else options.channel
    written = iter([Pending(text, lambda text=text: text, spoken=False) for text in options.text])  # type: ignore[misc]
    pipe = PipeReader(stdin, options.input_rate, channel) if PIPE in options.files else None
    spoken = iter([_spoken(name, pipe, channel) for name in options.files])
    return [next(spoken if kind == SOUND else written) for kind in options.kinds]


def _spoken(name: str, pipe: PipeReader | None, channel: int | Literal["mix"]) -> Pending:
    if name == PIPE and pipe is not None:
        return Pending(name, pipe.take, pipe=pipe)
    with collect_warnings() as sound_warnings:
        sound = read_audio(name, channel=channel)
    return Pending(name, lambda: sound, sound_warnings=tuple(sound_warnings))


class Output:
    """Takes chunks [S] of one answer as they come; `kept`: it has ended and left a file."""

    kept = False

    def write(self, samples: Tensor) -> None:
        raise NotImplementedError

    def end(self, outcome: Outcome) -> None:
        """The answer has ended; nothing is written afterwards."""


class WavOutput(Output):
    """Writes a WAV file, which appears when it is closed, and only if it holds a sample."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        self._writer = WavWriter(path, sample_rate)

    def write(self, samples: Tensor) -> None:
        self._writer.append(samples)

    def end(self, outcome: Outcome) -> None:
        if self._writer.samples and outcome != "failed":
            self._writer.close()
            self.kept = True
        else:
            self._writer.abort()


class EncodedOutput(Output):
    """Writes a FLAC, OGG or MP3 file at the end, and only if there is a sample."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        self._path, self._rate = path, sample_rate
        self._chunks: list[Tensor] = []

    def write(self, samples: Tensor) -> None:
        self._chunks.append(samples)

    def end(self, outcome: Outcome) -> None:
        if any(map(len, self._chunks)) and outcome != "failed":
            write_audio(self._path, torch.cat(self._chunks), self._rate)
            self.kept = True


class PipeOutput(Output):
    """Writes raw PCM (s16le) to a stream, each chunk at once; answers follow one another, so the stream stays open."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, samples: Tensor) -> None:
        self._stream.write(pcm16(samples))
        self._stream.flush()


class SpeakerOutput(Output):
    """Plays on the default loudspeaker; UserError where sounddevice or PortAudio is missing, or none plays this rate."""

    def __init__(self, sample_rate: int) -> None:
        device = load_sounddevice()
        try:
            self._stream = device.RawOutputStream(samplerate=sample_rate, channels=1, dtype="int16", latency="low")
            self._stream.start()
        except device.PortAudioError as error:
            raise UserError(f"no loudspeaker plays {sample_rate} Hz ({error}); use --out answer.wav") from error

    def write(self, samples: Tensor) -> None:
        self._stream.write(pcm16(samples))

    def end(self, outcome: Outcome) -> None:
        if outcome == "done":
            self._stream.stop()  # plays what is left
        else:
            self._stream.abort()
        self._stream.close()


class Paced(Output):
    """Passes chunks on to an output in its own thread, so that a slow output (a loudspeaker) never blocks the model; an error
    there is raised by the next `write`, or at the end.

    Args:
        sample_rate: where given, a chunk is passed on no earlier than 0.1 s before a player that started
            with the first chunk would need it.
    """

    def __init__(self, output: Output, sample_rate: int | None = None) -> None:
        self._output, self._rate = output, sample_rate
        self._queue: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def write(self, samples: Tensor) -> None:
        self._check()
        self._queue.put(samples)

    def end(self, outcome: Outcome) -> None:
        if outcome != "done":
            self._stop.set()
        self._queue.put(None)
        try:
            self._thread.join()
        except (KeyboardInterrupt, SystemExit):
            self.end("stopped")
            raise
        self._output.end("failed" if self._error is not None else outcome)
        self.kept = self._output.kept
        if outcome == "done":
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _pass_on(self) -> None:
        due = time.monotonic()
        while (samples := self._queue.get()) is not None and not self._stop.is_set():
            if self._rate is not None:
                now = time.monotonic()
                if self._stop.wait(max(due - 0.1 - now, 0)):
                    return
                due = max(due, time.monotonic()) + len(samples) / self._rate
            try:
                self._output.write(samples)
            except Exception as error:  # raised again in the caller's thread
                self._error = error
                return


class Outputs:
    """Outputs of an answer, as a context: Ctrl-C (and any other exit) stops them; an error, and `broken`, make them fail."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs
        self.broken = False

    @property
    def kept(self) -> bool:
        """Whether one of them has left a file."""
        return any(output.kept for output in self._outputs)

    def write(self, samples: Tensor) -> None:
        for output in self._outputs:
            output.write(samples)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        outcome: Outcome = "done" if error_type is None else "failed" if issubclass(error_type, Exception) else "stopped"
        outcome = "failed" if self.broken else outcome
        with contextlib.ExitStack() as stack:
            for output in self._outputs:
                stack.callback(output.end, outcome)
