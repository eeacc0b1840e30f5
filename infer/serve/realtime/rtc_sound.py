"""Sound of a call: what a client says, from its frames, and what is said to it, as frames in real time.

    the client's track -> TrackListener -> samples at 24 kHz -> session
    answers' outlets -> SoundTrack: 20 ms at each tick of its clock -> aiortc: Opus, RTP

What the clock has taken from an outlet was heard; what waits in it can still be cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from fractions import Fraction

import numpy as np
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av.audio.frame import AudioFrame

from infer.pcm import PCM_RATE, Resampler, SampleQueue, faded, to_int16
from infer.serve.realtime.playback import Outlet

RATE = 48_000  # samples per second of Opus in RTP
FRAME = 960  # samples of a packet: 20 ms
FADE = 480  # samples in which sound that is cut dies away: 10 ms
EDGE = 240  # samples in which sound ends and begins again around a gap: 5 ms
LATE = 0.2  # seconds by which the clock may be behind and still send everything; later it leaves out what is past
STALL = 0.5  # seconds without a frame of the client's, after which it is taken to be silent
WAITING = 500  # frames of the client's that may wait to be heard; older ones are dropped


class SoundTrack(MediaStreamTrack):
    """What a client hears: the sound of answers (`outlets`), one after another, and silence between; the next frame has the
    rest of sound that was cut (`dying`) besides."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.outlets: deque[CallOutlet] = deque()
        self.dying = SampleQueue()
        self._began: float | None = None
        self._count = 0

    async def recv(self) -> AudioFrame:
        """The next 20 ms, when they are due."""
        if self.readyState != "live":
            raise MediaStreamError
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        late = now - self._began - self._count * FRAME / RATE
        if late < 0:
            await asyncio.sleep(-late)
        elif late > LATE:
            self._count += int(late * RATE / FRAME)
        frame = AudioFrame.from_ndarray(to_int16(self.next_frame())[None], "s16", "mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, self._count * FRAME, Fraction(1, RATE)
        self._count += 1
        return frame

    def next_frame(self) -> np.ndarray:
        """The next samples [960] that are played."""
        frame, at = np.zeros(FRAME, np.float32), 0
        while self.outlets and at < FRAME:
            piece = self.outlets[0].take(FRAME - at)
            frame[at : at + len(piece)] = piece
            at += len(piece)
            if not self.outlets[0].over:
                break
            self.outlets.popleft()
        rest = self.dying.take(FRAME)
        frame[: len(rest)] += rest
        return frame


class CallOutlet(Outlet):
    """To a client's track; `emit` takes the samples that are played."""

    def __init__(self, track: SoundTrack, emit: Callable[[np.ndarray], None]) -> None:
        super().__init__(RATE, emit)
        self._track = track
        self._queue = SampleQueue()
        self._taken = 0
        self._ended = self._cleared = False
        self._dry = self._starved = False  # nothing is left although more is to come, and silence was played since then

    def ahead(self) -> float:
        return self._queue.count / RATE

    @property
    def heard(self) -> float:
        return self._taken / RATE

    @property
    def over(self) -> bool:
        """Nothing more is played."""
        return self._cleared or (self._ended and not self._queue.count)

    def send(self, samples: np.ndarray) -> None:
        """Let samples [S] go; the gain is that of the moment in which they are played."""
        if self._cleared:
            return
        if not self.sent:
            self._track.outlets.append(self)
        elif self._dry:
            self.underruns += self._starved
            samples = np.concatenate([faded(samples[:EDGE], 0.0, 1.0), samples[EDGE:]])
        self._dry = self._starved = False
        self._queue.push(samples)
        self.sent = (self._taken + self._queue.count) / RATE

    def take(self, most: int) -> np.ndarray:
        """The next samples, at most that many, for the client to hear."""
        samples = self._queue.take(most)
        if len(samples):
            if not self._taken:
                self.tell("started")
            self._taken += len(samples)
            self._emit(samples)
            samples = self.ducked(samples)
        if not self._queue.count and not self._ended:
            self._starved |= len(samples) < most
            if not self._dry:
                samples = np.concatenate([samples[:-EDGE], faded(samples[-EDGE:], 1.0, 0.0)])
            self._dry = True
        self._stop_if_over()
        return samples

    def clear(self) -> None:
        if self.over:
            return
        rest = self._queue.take(FADE)
        self._queue.clear()
        self._cleared, self.sent = True, self.heard
        if self._taken:
            self._track.dying.clear()
            self._track.dying.push(faded(rest, self._gain, 0.0))
            self.tell("cleared")
        self.free()

    def end(self) -> None:
        self._ended = True
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        """Tell that all was played."""
        if self.over and self._taken and not self._cleared:
            self.tell("stopped")
            self.free()


class TrackListener:
    """What a client says on its track of 48 kHz, as samples at 24 kHz; what was lost on the way, or not sent, is silence."""

    def __init__(self, track: MediaStreamTrack) -> None:
        self._track = track
        self._frames: asyncio.Queue[AudioFrame] = asyncio.Queue(WAITING)
        self._rate = Resampler(RATE, PCM_RATE)
        self._due: int | None = None  # time stamp of the next sample

    async def read(self) -> None:
        """Take the frames as they come; returns when the track ends."""
        while True:
            try:
                frame = await self._track.recv()
            except MediaStreamError:
                return
            assert isinstance(frame, AudioFrame)
            if self._frames.full():
                self._frames.get_nowait()
            self._frames.put_nowait(frame)

    async def listen(self, hear: Callable[[np.ndarray], Awaitable[None]]) -> None:
        """Pass on what came, for ever."""
        while True:
            try:
                frames = [await asyncio.wait_for(self._frames.get(), STALL)]
            except asyncio.TimeoutError:
                if self._due is not None:
                    self._due += round(STALL * RATE)
                    await hear(self._rate.push(np.zeros(round(STALL * RATE), np.float32)))
                continue
            frames += [self._frames.get_nowait() for _ in range(self._frames.qsize())]
            await hear(self._rate.push(np.concatenate([self._samples(frame) for frame in frames])))

    def _samples(self, frame: AudioFrame) -> np.ndarray:
        """A frame's samples [S] at 48 kHz, after silence for what is missing before it."""
        stamp = frame.pts or 0
        missing = 0 if self._due is None else min(max(stamp - self._due, 0), RATE)
        self._due = stamp + frame.samples
        samples = frame.to_ndarray().reshape(-1, frame.layout.nb_channels).mean(axis=1, dtype=np.float32) / 32768
        return np.concatenate([np.zeros(missing, np.float32), samples])
