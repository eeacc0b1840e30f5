"""The sound of a call without a connection: what is played and when, and what is heard of a client."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from infer.serve.realtime import rtc_sound
from infer.serve.realtime.playback import SOFT
from infer.serve.realtime.rtc_sound import FADE, FRAME, RATE, CallOutlet, SoundTrack, TrackListener

STEEPEST = 0.3 * 2 * np.pi * 220 / RATE
"""Largest step between two samples of `wave`."""


def wave(seconds: float) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 220 * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


class Played:
    """A track, an outlet of it, and what it told."""

    def __init__(self, track: SoundTrack | None = None) -> None:
        self.track, self.told = track or SoundTrack(), list[str]()
        self.emitted = 0
        self.outlet = CallOutlet(self.track, self._count)
        self.outlet.tell = self.told.append

    def _count(self, samples: np.ndarray) -> None:
        self.emitted += len(samples)

    def frames(self, count: int) -> np.ndarray:
        return np.concatenate([self.track.next_frame() for _ in range(count)])


def check_no_click(samples: np.ndarray) -> None:
    """No step is steeper than the wave, and what a fade of 5 ms adds to it."""
    assert np.abs(np.diff(samples)).max() < STEEPEST + 0.3 / rtc_sound.EDGE * 1.1


async def test_what_is_ahead_and_what_was_heard() -> None:
    played = Played()
    outlet = played.outlet
    assert not played.frames(2).any() and played.told == []
    outlet.send(wave(0.1))
    assert (outlet.sent, outlet.ahead(), outlet.heard) == (0.1, 0.1, 0.0) and played.emitted == 0
    assert np.array_equal(played.frames(2), wave(0.04))
    assert abs(outlet.ahead() - 0.06) < 1e-9 and outlet.heard == 0.04 and played.told == ["started"]
    outlet.end()
    rest = played.frames(4)
    assert np.array_equal(rest[:2880], wave(0.1)[1920:]) and not rest[2880:].any()
    assert outlet.heard == outlet.sent == 0.1 and played.emitted == 4800
    assert played.told == ["started", "stopped"] and outlet.underruns == 0
    outlet.clear()
    assert played.told == ["started", "stopped"]


async def test_sound_that_is_cleared_dies_away() -> None:
    played = Played()
    played.outlet.send(wave(0.3))
    before = played.frames(3)
    played.outlet.clear()
    assert played.outlet.sent == played.outlet.heard == 0.06 and played.outlet.ahead() == 0
    after = played.frames(2)
    check_no_click(np.concatenate([before, after]))
    assert after[: FADE // 2].any() and not after[FADE:].any()
    played.outlet.send(wave(0.1))  # what comes too late
    played.outlet.end()
    assert not played.frames(2).any() and played.told == ["started", "cleared"]


async def test_ducking_begins_with_the_next_frame_and_clicks_not() -> None:
    played = Played()
    played.outlet.send(wave(0.3))
    one = played.frames(2)
    played.outlet.soft = True
    two = played.frames(4)
    played.outlet.soft = False
    three = played.frames(4)
    whole = wave(0.3)
    assert np.allclose(two[FRAME:], whole[3 * FRAME : 6 * FRAME] * SOFT)
    assert np.allclose(three[FRAME:], whole[7 * FRAME : 10 * FRAME])
    check_no_click(np.concatenate([one, two, three]))


async def test_a_gap_is_counted_and_clicks_not() -> None:
    played = Played()
    played.outlet.send(wave(0.05))
    one = played.frames(5)
    assert played.outlet.heard == 0.05
    played.outlet.send(wave(0.05))
    check_no_click(np.concatenate([one, played.frames(2)]))
    assert played.outlet.underruns == 1
    played.outlet.end()
    played.frames(1)
    assert played.told == ["started", "stopped"]


async def test_frames_come_in_real_time() -> None:
    track, loop = SoundTrack(), asyncio.get_running_loop()
    since = loop.time()
    frames = [await track.recv() for _ in range(11)]
    assert abs(loop.time() - since - 0.2) < 0.05
    assert [frame.pts for frame in frames] == [number * FRAME for number in range(11)]
    await asyncio.sleep(0.5)  # the loop was busy: what is past is left out
    assert (await track.recv()).pts >= 11 * FRAME + 0.4 * RATE
    track.stop()
    with pytest.raises(MediaStreamError):
        await track.recv()


class Given(MediaStreamTrack):
    """Frames that a test gives."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[AudioFrame | None] = asyncio.Queue()

    def give(self, number: int, level: float = 0.5) -> None:
        samples = np.full((1, 2 * FRAME), level * 32767, np.int16)
        frame = AudioFrame.from_ndarray(samples, "s16", "stereo")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), number * FRAME
        self.frames.put_nowait(frame)

    async def recv(self) -> AudioFrame:
        frame = await self.frames.get()
        if frame is None:
            raise MediaStreamError
        return frame


async def test_what_was_lost_is_silence(monkeypatch: Any) -> None:
    monkeypatch.setattr(rtc_sound, "STALL", 0.1)
    track = Given()
    listener = TrackListener(track)
    heard: list[np.ndarray] = []

    async def hear(samples: np.ndarray) -> None:
        heard.append(samples)

    def seconds() -> float:
        return sum(map(len, heard)) / 24_000

    tasks = [asyncio.create_task(listener.read()), asyncio.create_task(listener.listen(hear))]
    await asyncio.sleep(0.15)
    assert seconds() == 0, "nothing is made up before anything came"
    for number in (0, 1, 4, 5):
        track.give(number)
    await asyncio.sleep(0.05)
    whole = np.concatenate(heard)
    assert abs(seconds() - 0.12) < 0.003
    assert abs(whole[480] - 0.5) < 0.02 and abs(whole[1400]) < 0.02 and abs(whole[2400] - 0.5) < 0.02
    await asyncio.sleep(0.2)
    stalled = seconds()
    assert 0.2 < stalled < 0.4, "a client that sends nothing is silent"
    track.give(6)  # it went on where it was
    track.frames.put_nowait(None)
    await asyncio.wait([tasks[0]], timeout=1)
    await asyncio.sleep(0.02)
    assert abs(seconds() - stalled - 0.02) < 0.003 and tasks[0].done()
    tasks[1].cancel()
