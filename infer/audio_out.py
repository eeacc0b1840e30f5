"""Outputs for an answer's sound while it is made: a file, a pipe, the loudspeaker.

Dimensions: S samples.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import BinaryIO, Literal, Protocol

import torch
from torch import Tensor

from infer.portaudio import load_sounddevice
from omni.audio.wav import WavWriter, pcm16, write_audio
from omni.errors import UserError

How = Literal["done", "stopped", "failed"]
"""End of an answer: complete, interrupted by the user (sound written so far stays), or failed by an error (nothing
stays)."""


class Output(Protocol):
    """Takes chunks [S] of one answer as they come.

    Attributes:
        kept: whether it has ended and left a file.
    """

    @property
    def kept(self) -> bool: ...

    def write(self, samples: Tensor) -> None: ...

    def end(self, outcome: How) -> None: ...


class WavOutput:
    """Writes a WAV file, which appears when it is closed, and only if it holds a sample."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        self._writer = WavWriter(path, sample_rate)
        self.kept = False

    def write(self, samples: Tensor) -> None:
        self._writer.append(samples)

    def end(self, outcome: How) -> None:
        if self._writer.samples and outcome != "failed":
            self._writer.close()
            self.kept = True
        else:
            self._writer.abort()


class EncodedOutput:
    """Writes a FLAC, OGG or MP3 file at the end, and only if there is a sample."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        self._path, self._rate = path, sample_rate
        self._chunks: list[Tensor] = []
        self.kept = False

    def write(self, samples: Tensor) -> None:
        self._chunks.append(samples)

    def end(self, outcome: How) -> None:
        if any(map(len, self._chunks)) and outcome != "failed":
            write_audio(self._path, torch.cat(self._chunks), self._rate)
            self.kept = True


class PipeOutput:
    """Writes raw PCM (s16le) to a stream, each chunk at once; answers follow one another, so the stream stays open."""

    kept = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, samples: Tensor) -> None:
        self._stream.write(pcm16(samples))
        self._stream.flush()

    def end(self, outcome: How) -> None:
        pass


class SpeakerOutput:
    """Plays on the default loudspeaker, through the optional package `sounddevice`.

    Raises:
        UserError: the package or its PortAudio library is missing, or no loudspeaker plays this rate.
    """

    kept = False

    def __init__(self, sample_rate: int) -> None:
        device = load_sounddevice()
        try:
            self._stream = device.RawOutputStream(samplerate=sample_rate, channels=1, dtype="int16", latency="low")
            self._stream.start()
        except device.PortAudioError as error:
            raise UserError(f"no loudspeaker plays {sample_rate} Hz ({error}); use --out answer.wav") from error

    def write(self, samples: Tensor) -> None:
        self._stream.write(pcm16(samples))

    def end(self, outcome: How) -> None:
        if outcome == "done":
            self._stream.stop()  # plays what is left
        else:
            self._stream.abort()
        self._stream.close()


class Paced:
    """Passes chunks on to an output in its own thread, so that a slow output (a loudspeaker) never blocks the model.

    Args:
        output: the output.
        sample_rate: where given, a chunk is passed on no earlier than `ahead` seconds before a player that started
            with the first chunk would need it.

    An error in the thread is raised by the next `write`, or at the end.
    """

    def __init__(self, output: Output, sample_rate: int | None = None, ahead: float = 0.1) -> None:
        self._output, self._rate, self._ahead = output, sample_rate, ahead
        self._queue: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    @property
    def kept(self) -> bool:
        return self._output.kept

    def write(self, samples: Tensor) -> None:
        self._check()
        self._queue.put(samples)

    def end(self, outcome: How) -> None:
        if outcome != "done":
            self._stop.set()
        self._queue.put(None)
        try:
            self._thread.join()
        except (KeyboardInterrupt, SystemExit):
            self.end("stopped")
            raise
        self._output.end("failed" if self._error is not None else outcome)
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
                if self._stop.wait(max(due - self._ahead - now, 0)):
                    return
                due = max(due, time.monotonic()) + len(samples) / self._rate
            try:
                self._output.write(samples)
            except Exception as error:  # raised again in the caller's thread
                self._error = error
                return


class Outputs:
    """All outputs of one answer, as a context: Ctrl-C (and any other exit) stops them, an error makes them fail.

    Attributes:
        broken: set where the answer is broken although nothing was raised; the outputs then fail too.
    """

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        outcome: How = "done" if kind is None else "failed" if issubclass(kind, Exception) else "stopped"
        outcome = "failed" if self.broken else outcome
        with contextlib.ExitStack() as stack:
            for output in self._outputs:
                stack.callback(output.end, outcome)
