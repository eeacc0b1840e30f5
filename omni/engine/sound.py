"""The sound thread: turns the outputs of steps into text and sound, and hands them to the listeners.

The frames of all rows that a step finished are decoded together. Nothing here holds the step: while a step runs, the outputs of
the one before become sound.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from omni.codec.base import AudioCodec, CodecStream
from omni.engine.client import Running
from omni.engine.worker import Worker
from omni.generate.results import Ended, Reason
from omni.generate.rows import StepOutput

Outputs = list[tuple[Running, StepOutput]]


class SoundThread:
    """Writes the answers of one engine.

    Args:
        finished: called where an answer ended by what only its text or its sound could tell.
    """

    def __init__(self, finished: Callable[[Running], None]) -> None:
        self._finish = weakref.WeakMethod(finished)
        self._work: deque[Outputs | tuple[Running, Reason]] = deque()
        self._streams: dict[Running, CodecStream] = {}
        self._worker = Worker("omni-sound", self._turn)
        self.stop = self._worker.stop

    def put(self, outputs: Outputs) -> None:
        """Take the outputs of a step."""
        self._work.append(outputs)
        self._worker.wake()

    def end(self, running: Running, reason: Reason) -> None:
        """Take the end of an answer, after its last output; the reason counts where its text and sound gave none."""
        self._work.append((running, reason))
        self._worker.wake()

    def _finished(self, running: Running) -> None:
        if (finish := self._finish()) is not None:
            finish(running)

    def _turn(self) -> float | None:
        try:
            work = self._work.popleft()
        except IndexError:
            return None
        if isinstance(work, tuple):
            self._end(*work)
        else:
            self._write(work)
        return 0.0

    def _write(self, outputs: Outputs) -> None:
        sounding: list[tuple[Running, list[int]]] = []
        for running, output in outputs:
            reply = running.reply
            with running.changed:
                if running.cancelled or running.over:
                    continue
                before = len(reply.frames)
                running.step()
                try:
                    events = reply.write(output)
                except Exception as error:  # a lack of memory; others are the reply's own
                    self._raise(running, error)
                    continue
                for event in events:
                    running.put(event)
                sounding += [(running, frame) for frame in reply.frames[before:]]
        self._decode(sounding)
        for running, _ in outputs:
            if running.reply.reason is not None and not running.left.is_set():
                self._finished(running)

    def _decode(self, sounding: Sequence[tuple[Running, list[int]]]) -> None:
        for running, frame in sounding:
            codec = running.codec
            if codec is None:
                continue
            try:
                stream = self._streams.get(running)
                if stream is None:
                    stream = self._streams[running] = codec.stream()
                samples = stream.push(torch.tensor(frame)[:, None]).cpu()
            except Exception as error:
                self._broken(running, codec, error)
                continue
            with running.changed:
                for chunk in running.reply.sound(samples):
                    running.put(chunk)

    def _broken(self, running: Running, codec: AudioCodec, error: Exception) -> None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            self._raise(running, error)
        else:
            way = "generate_batch(sound=False) gives its codes"
            running.reply.fail(f"codec {codec.name} cannot decode the answer ({error}); {way}")

    def _raise(self, running: Running, error: BaseException) -> None:
        running.fail(error)
        self._finished(running)

    def _end(self, running: Running, reason: Reason) -> None:
        stream, reply, codec = self._streams.pop(running, None), running.reply, running.codec
        if not running.cancelled and reply.error is None and reason != "error":
            with running.changed:
                reply.reason = reply.reason or reason
                for event in reply.finish():
                    running.put(event)
            if stream is not None and codec is not None and reply.error is None:
                try:
                    samples = stream.finish().cpu()
                    with running.changed:
                        for chunk in reply.sound(samples):
                            running.put(chunk)
                except Exception as error:
                    self._broken(running, codec, error)
        with running.changed:
            if not running.cancelled and running.failure is None:
                running.put(Ended(reply.reason or reason, running.timings(), reply.error))
