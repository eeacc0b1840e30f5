"""The sound thread: turns the outputs of steps into text and sound, and hands them to the listeners.

The frames of all rows that a step finished are decoded together, while the next step runs.

Where the step computes with several CPU threads and the codec is a network, the stepping thread decodes between two steps:
beside each other both take longer (0.5B in int8 and SNAC on two cores of an AMD EPYC: 51 ms a frame in turn, 62 ms beside).

What an engine's own process does for one listener's sound delays all others, since its threads share the interpreter's lock. So
a codec without weights decodes in the clients' process, the sound of all answers of a message in one call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.engine.answer import CodedSound, Running
from omni.engine.stats import Recorder
from omni.engine.worker import Worker
from omni.generate.results import Ended, Event, Reason
from omni.generate.rows import StepOutput

K = TypeVar("K", bound=Hashable)

Outputs = list[tuple[Running, StepOutput | Reason]]
"""What answers wrote in a step; the reason of an answer's end comes after its last output."""

BEFORE = 3
"""Steps that a live listener's first sound lasts at least where others speak, up to two frames: it plays at once, and the next
may be delayed by somebody's question."""

FIRST = 0.08
"""Seconds that it lasts at least then, up to two frames as well: a thread of a busy machine waits for its core now and then."""


def is_portable(codec: AudioCodec) -> bool:
    """Whether clients of another process decode: a codec says so, and needs no later frame for a frame's samples."""
    return codec.portable and codec.exact_samples(1) == codec.frame_samples


def cannot_decode(codec: AudioCodec, error: Exception) -> str:
    """Error text of an answer whose codes the codec refuses."""
    return f"codec {codec.name} cannot decode the answer ({error}); generate([...], sound=False) gives its codes"


class SoundDecoder(Generic[K]):
    """Decodes the sound of answers, which have keys, all that come at a time in one call; belongs to one thread."""

    def __init__(self, codec: AudioCodec) -> None:
        self.codec, self._batch = codec, codec.batch()
        self._streams: dict[K, int] = {}  # of the batch

    def push(self, frames: Mapping[K, list[list[int]]]) -> dict[K, Tensor | Exception]:
        """The next samples [S] of each answer, or why it cannot be decoded. `frames`: the next ones, A codes each."""
        sounds: dict[K, Tensor | Exception] = {}
        for count in {len(own) for own in frames.values()}:
            keys = [key for key, own in frames.items() if len(own) == count]
            codes = torch.from_numpy(np.array([frames[key] for key in keys])).transpose(1, 2)  # [N, A, f]
            try:
                self._streams |= {key: self._batch.open() for key in keys if key not in self._streams}
                sounds |= zip(keys, self._batch.push([self._streams[key] for key in keys], codes), strict=True)
            except Exception as error:  # of the call as a whole: the thread goes on for others
                sounds |= dict.fromkeys(keys, error)
        return sounds

    def finish(self, key: K) -> Tensor | Exception:
        """The last samples [S] of an answer."""
        return self._batch.finish([self._streams[key]])[0] if key in self._streams else torch.zeros(0)

    def close(self, key: K) -> None:
        """Drop an answer's stream, where it has one."""
        stream = self._streams.pop(key, None)
        if stream is not None:
            self._batch.close(stream)

    def keep(self, wanted: Container[K]) -> None:
        """Drop the streams of other answers."""
        for key in [key for key in self._streams if key not in wanted]:
            self.close(key)


class SoundThread:
    """Writes the answers of one engine.

    Args:
        finished: called where an answer ended by what only its text or its sound could tell.
        recorder: is told when live listeners' sound came.
    """

    def __init__(self, finished: Callable[[Running], None], recorder: Recorder) -> None:
        self._recorder = recorder
        self._finished = finished
        self._work: deque[Outputs] = deque()
        self._decoders: dict[AudioCodec, SoundDecoder[Running]] = {}
        self._held: dict[Running, Tensor] = {}  # first sounds that do not last long enough yet
        self._coded: dict[Running, list[list[int]]] = {}  # the same of those that are decoded elsewhere
        self._step = 0.0  # seconds of one
        self._order = threading.RLock()  # held from the taking of a piece of work to its end
        self._worker = Worker("omni-sound", self._turn)
        self.stop = self._worker.stop

    def put(self, outputs: Outputs, step: float | None = None) -> None:
        """Take outputs, and the seconds that a step takes, 0 where nobody else speaks; from the stepping thread. The reason of
        an end counts where text and sound gave none."""
        self._step = self._step if step is None else step
        self._work.append(outputs)
        codecs = [running.codec for running, _ in outputs if running.codec is not None]
        if torch.get_num_threads() > 1 and any(c.takes_threads and c.device.type == "cpu" for c in codecs):
            while self._next():
                pass
        else:
            self._worker.wake()

    def _turn(self) -> float | None:
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # of this thread; more would take the stepping thread's cores
        return 0.0 if self._next() else None

    def _next(self) -> bool:
        """Do a piece of work; returns whether there was one."""
        with self._order:
            try:
                outputs = self._work.popleft()
            except IndexError:
                return False
            try:
                self._write(outputs)
            except Exception as error:  # a fault of ours, or a lack of memory: nobody waits for what does not come
                for running, _ in outputs:
                    self._raise(running, error)
            return True

    def _write(self, outputs: Outputs) -> None:
        sounding: dict[AudioCodec, dict[Running, list[list[int]]]] = {}
        for running, output in outputs:
            if isinstance(output, str):
                self._end(running, output)
                continue
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
                frames = reply.frames[before:]
                for event in events:
                    running.put(event, notify=not frames or running.codec is None)  # else with the sound
                if running.coded:
                    self._code(running, frames)
                elif frames and running.codec is not None:
                    sounding.setdefault(running.codec, {})[running] = frames
        for codec, each in sounding.items():
            if codec not in self._decoders:
                self._decoders[codec] = SoundDecoder(codec)
            for running, sound in self._decoders[codec].push(each).items():
                self._play(running, sound)
        for running, _ in outputs:
            if running.reply.reason is not None and not running.left.is_set():
                self._finished(running)

    def _code(self, running: Running, frames: list[list[int]], last: bool = False) -> None:
        """Give the listener frames to decode; `changed` is held."""
        codec, begun = running.codec, running.plays is not None or not running.live
        assert codec is not None
        frames = self._coded.pop(running, []) + frames
        if not begun and not last and len(frames) * codec.frame_samples < self._least(codec):
            self._coded[running] = frames
        elif frames:
            span = running.reply.advance(len(frames) * codec.frame_samples)
            self._sounded(running, CodedSound(frames, *span))
            return
        running.outlet.notify()

    def _least(self, codec: AudioCodec) -> float:
        """Samples that a live listener's first sound has at least."""
        seconds = max(BEFORE * self._step, FIRST) if self._step else 0.0
        return min(round(seconds * codec.sample_rate), 2 * codec.frame_samples)

    def _sounded(self, running: Running, event: Event | CodedSound) -> None:
        """Give the listener what came of its sound, and note when, unless its process does; `changed` is held."""
        waits, late = running.known.first_audio is None, running.put(event)
        if late is not None and not running.coded:
            self._recorder.note(late=[late])
        elif waits and running.known.first_audio is not None and running.pace == "live":
            self._recorder.note(first_audio=[running.known.first_audio])

    def _play(self, running: Running, sound: Tensor | Exception, last: bool = False) -> None:
        """Give the listener a sound, or end the answer whose codec failed."""
        codec = running.codec
        assert codec is not None
        if isinstance(sound, (MemoryError, torch.OutOfMemoryError)):
            self._raise(running, sound)
        elif isinstance(sound, Exception):
            running.reply.fail(cannot_decode(codec, sound))
        else:
            if running.live and running.plays is None:  # its first sound is held until it lasts long enough
                sound = torch.cat([self._held.pop(running, sound[:0]), sound])
                if not last and len(sound) < self._least(codec):
                    self._held[running], sound = sound, sound[:0]
            with running.changed:
                if not sound.shape[0]:
                    running.outlet.notify()
                for event in running.reply.sound(sound):
                    self._sounded(running, event)

    def _raise(self, running: Running, error: BaseException) -> None:
        running.fail(error)
        self._finished(running)

    def _end(self, running: Running, reason: Reason) -> None:
        reply, decoder = running.reply, None if running.codec is None else self._decoders.get(running.codec)
        if not running.cancelled and running.failure is None and reply.error is None and reason != "error":
            with running.changed:
                reply.reason = reply.reason or reason
                for event in reply.finish():
                    running.put(event)
                if running.coded:
                    self._code(running, [], last=True)
            if decoder is not None and reply.error is None:
                self._play(running, decoder.finish(running), last=True)
        self._held.pop(running, None)
        self._coded.pop(running, None)
        if decoder is not None:
            decoder.close(running)
        self._recorder.note(answers=1)
        with running.changed:
            if not running.cancelled and running.failure is None:
                running.put(Ended(reply.reason or reason, running.timings(), reply.error))
