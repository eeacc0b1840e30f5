"""The microphone, which records blocks as they come, and the loudspeaker, which stops at once and knows what was played.

PortAudio asks for the samples that are to be heard at a time ahead of the present one. Each piece of an answer is noted with
that time, so that what was played is known between two of its calls, gaps left out:

    time          ... | piece 0       | gap | piece 1       | piece 2 ...
    stream.time                               ^ now: played = piece 0 and this part of piece 1
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from infer.chat.devices import NAMES, OPTIONS, Kind, SoundDevice, all_devices, listing
from infer.pcm import PCM_RATE, Resampler, SampleQueue, faded, to_int16
from infer.serve.realtime.playback import SOFT
from omni.errors import UserError

LATENCY = 0.06  # seconds that a device is asked to hold: its callbacks are Python's, and wait for other threads
MOST_AHEAD = 2.0  # seconds by which a device can be ahead; where it tells more, or less than none, its latency is taken


class MicrophoneBlock(NamedTuple):
    """A block of the microphone; `lost`: some before it was not taken in time."""

    raw: np.ndarray
    lost: bool


class SoundStream:
    """A stream of 16-bit samples on a device, in one channel at `PCM_RATE`, or else at the device's own rate, or else in two
    channels; UserError where the device takes none of these.

    Args:
        callback: of PortAudio, called in a thread of its own.
        deliver: called there with this stream when its device is gone.
    """

    def __init__(
        self, sound: Any, device: SoundDevice, kind: Kind, callback: Callable[..., None], deliver: Callable[[Any], None]
    ) -> None:
        self.sound, self.device, self.kind = sound, device, kind
        self._stopping = False
        make = sound.RawInputStream if kind == "input" else sound.RawOutputStream
        channel_counts, refusals = range(1, min(device.channels(kind), 2) + 1), []
        for channels, rate in itertools.product(channel_counts, dict.fromkeys((PCM_RATE, device.rate))):
            try:
                self._stream = make(
                    samplerate=rate,
                    channels=channels,
                    dtype="int16",
                    device=device.index,
                    latency=LATENCY,
                    callback=callback,
                    finished_callback=lambda: None if self._stopping else deliver(self),
                )
            except sound.PortAudioError as error:
                refusals.append(f"{rate} Hz in {channels} channel{'s' * (channels > 1)}: {' '.join(str(error).split())}")
            else:
                self._rate, self._channels = rate, channels
                return
        raise self._refused("opened", "; ".join(refusals))

    def _refused(self, act: str, reason: str) -> UserError:
        return UserError(
            f"the {NAMES[self.kind]} {self.device} cannot be {act} ({reason}); end other programs that use it, or choose "
            f"another with {OPTIONS[self.kind]}: {listing(all_devices(self.sound), self.kind)}"
        )

    def start(self) -> None:
        """UserError where the device refuses."""
        try:
            self._stream.start()
        except self.sound.PortAudioError as error:
            raise self._refused("started", " ".join(str(error).split())) from error

    def lost_error(self) -> UserError:
        """The error of a device that is gone."""
        others = listing([other for other in all_devices(self.sound) if other.index != self.device.index], self.kind)
        return UserError(
            f"the {NAMES[self.kind]} {self.device} is gone, or {'gives' if self.kind == 'input' else 'takes'} no more sound; "
            f"connect it again or choose another with {OPTIONS[self.kind]}: besides it {others}"
        )

    def close(self) -> None:
        """Stop at once and close, also where the device is gone."""
        self._stopping = True
        for act in (self._stream.abort, self._stream.close):
            with contextlib.suppress(self.sound.PortAudioError):
                act()


class Loudspeaker(SoundStream):
    """Plays one answer after another, samples at `PCM_RATE`."""

    def __init__(self, sound: Any, device: SoundDevice, deliver: Callable[[Any], None]) -> None:
        self._lock = threading.Lock()
        self._queue = SampleQueue()
        self._taken = 0  # samples of the answer that the device has got
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=512)  # when heard, first sample, samples
        self._gain = self._wanted = 1.0  # of the last sample, and from the next on
        self._last_time = 0.0
        super().__init__(sound, device, "output", self._fill, deliver)
        self._resampler = Resampler(PCM_RATE, self._rate)

    def begin(self) -> None:
        """Make ready for an answer; UserError where the device refuses."""
        with self._lock:
            self._queue.clear()
            self._marks.clear()
            self._taken = 0
        self._gain = self._wanted = 1.0
        self._resampler = Resampler(PCM_RATE, self._rate)
        if not self._stream.active:
            if not self._stream.stopped:  # the device ended it by itself
                self._stream.stop()
            self._stopping = False
            self.start()

    def write(self, samples: np.ndarray) -> None:
        """Play samples [S], float32, after those before."""
        with self._lock:
            self._queue.push(self._resampler.push(samples))

    def end(self) -> None:
        """The answer has no more samples."""
        with self._lock:
            self._queue.push(self._resampler.finish())

    def duck(self, on: bool) -> None:
        """Be softer, or as loud as before, from the next samples on."""
        self._wanted = SOFT if on else 1.0

    @property
    def played(self) -> float:
        """Seconds of the answer that were heard by now."""
        now = self._now()
        with self._lock:
            return self._played(now) / self._rate

    def _now(self) -> float:
        """The stream's time; of a device that is gone, the last that it told."""
        with contextlib.suppress(self.sound.PortAudioError):
            self._last_time = self._stream.time
        return self._last_time

    def _played(self, now: float) -> int:
        for at, first, count in reversed(self._marks):
            if at <= now:
                return first + min(int((now - at) * self._rate), count)
        return self._marks[0][1] if self._marks else 0

    @property
    def waits(self) -> bool:
        """Whether there are samples that were not heard yet."""
        now = self._now()
        with self._lock:
            return bool(self._queue.count) or self._played(now) < self._taken

    def stop(self) -> float:
        """Be silent at once; returns the seconds of the answer that were heard."""
        self._stopping = True
        with self._lock:
            now = self._now()
            self._taken = self._played(now)
            self._queue.clear()
            self._marks.clear()
            self._marks.append((now, self._taken, 0))
        with contextlib.suppress(self.sound.PortAudioError):  # the device is gone
            self._stream.abort()
        return self._taken / self._rate

    def _fill(self, out: Any, frames: int, time: Any, status: Any) -> None:
        ahead = time.outputBufferDacTime - time.currentTime
        at = self._now() + (ahead if 0 < ahead < MOST_AHEAD else self._stream.latency)
        with self._lock:
            piece = self._queue.take(frames)
            if len(piece):
                self._marks.append((at, self._taken, len(piece)))
                self._taken += len(piece)
        wanted = self._wanted
        piece, self._gain = faded(piece, self._gain, wanted), wanted
        data = np.repeat(to_int16(piece), self._channels).tobytes()
        out[: len(data)] = data
        out[len(data) :] = bytes(len(out) - len(data))


class MicrophoneInput(SoundStream):
    """Records until it is closed; delivers a `MicrophoneBlock` for each block, in PortAudio's thread."""

    def __init__(self, sound: Any, device: SoundDevice, deliver: Callable[[Any], None]) -> None:
        def take(data: Any, frames: int, time: Any, status: Any) -> None:
            deliver(MicrophoneBlock(np.frombuffer(bytes(data), np.int16), bool(status.input_overflow)))

        super().__init__(sound, device, "input", take, deliver)
        self._resampler = Resampler(self._rate, PCM_RATE)

    def samples(self, raw: np.ndarray) -> np.ndarray:
        """The samples [S] of the next block that was delivered: two channels are averaged, another rate is resampled."""
        if self._channels == 1 and self._rate == PCM_RATE:
            return raw
        return to_int16(self._resampler.push(raw.reshape(-1, self._channels).astype(np.float32).mean(axis=1) / 32768))
