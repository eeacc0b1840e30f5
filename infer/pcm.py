"""Samples: queued, as 16-bit PCM and G.711, and resampled while they come.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

import io
from collections import deque
from fractions import Fraction

import numpy as np
import soundfile
from av.audio.frame import AudioFrame
from av.filter import Graph

PCM_RATE, G711_RATE = 24_000, 8_000
"""Samples per second of the Realtime API: of `audio/pcm`, and of `audio/pcmu` and `audio/pcma`."""

SUBTYPES = {"audio/pcm": "PCM_16", "audio/pcmu": "ULAW", "audio/pcma": "ALAW"}
"""libsndfile's names of the formats that the Realtime API has."""


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Samples [S] as int16; what is beyond -1 to 1 is clipped."""
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


class SampleQueue:
    """Samples in their order; `count` is how many it holds."""

    def __init__(self) -> None:
        self.count = 0
        self._pieces: deque[np.ndarray] = deque()

    def push(self, samples: np.ndarray) -> None:
        """Add samples [S]."""
        if len(samples):
            self._pieces.append(samples)
            self.count += len(samples)

    def take(self, most: int) -> np.ndarray:
        """The next samples, at most that many."""
        taken = [np.zeros(0, np.float32)]
        while self._pieces and most:
            piece = self._pieces.popleft()
            if len(piece) > most:
                self._pieces.appendleft(piece[most:])
                piece = piece[:most]
            taken.append(piece)
            most -= len(piece)
            self.count -= len(piece)
        return np.concatenate(taken)

    def clear(self) -> None:
        self._pieces.clear()
        self.count = 0


class Resampler:
    """Samples at another rate, piece by piece, by FFmpeg's resampler, which holds back 2 ms (soxr's best holds 33); nothing is
    changed where the rates are the same."""

    def __init__(self, rate: int, new_rate: int) -> None:
        self._rate, self._pts = rate, 0
        self._filter = None if rate == new_rate else _resampling(rate, new_rate)

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Takes samples [S]; returns those that are ready at the new rate."""
        if self._filter is None or not len(samples):
            return samples
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples, dtype=np.float32)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = self._rate, self._pts, Fraction(1, self._rate)
        self._pts += len(samples)
        self._filter.push(frame)
        return _pulled(self._filter)

    def finish(self) -> np.ndarray:
        """The rest; nothing may be pushed afterwards."""
        if self._filter is None or not self._pts:
            return np.zeros(0, np.float32)
        self._filter.push(None)
        return _pulled(self._filter)


def _resampling(rate: int, new_rate: int) -> Graph:
    """FFmpeg's filters; av's own resampler would start threads for each, up to sixteen."""
    graph = Graph()
    graph.threads = 1
    source = graph.add("abuffer", sample_rate=str(rate), sample_fmt="fltp", channel_layout="mono", time_base=f"1/{rate}")
    resample, sink = graph.add("aresample", str(new_rate)), graph.add("abuffersink")
    source.link_to(resample)
    resample.link_to(sink)
    graph.configure()
    return graph


def _pulled(graph: Graph) -> np.ndarray:
    """The samples that are ready."""
    pieces = [np.zeros(0, np.float32)]
    while True:
        try:
            pieces.append(graph.pull().to_ndarray()[0])
        except (BlockingIOError, EOFError):
            return np.concatenate(pieces)


def decode(data: bytes, form: str) -> np.ndarray:
    """Samples [S] of raw bytes in one of `SUBTYPES`; of PCM (little-endian) there must be whole samples."""
    if form == "audio/pcm":
        return np.frombuffer(data, dtype="<i2").astype(np.float32) / 32768
    if not data:
        return np.zeros(0, np.float32)
    samples, _ = soundfile.read(
        io.BytesIO(data), dtype="float32", format="RAW", subtype=SUBTYPES[form], samplerate=8000, channels=1
    )
    return np.asarray(samples)


def encode(samples: np.ndarray, form: str) -> bytes:
    """Raw bytes of samples [S]; what is beyond -1 to 1 is clipped."""
    if form == "audio/pcm":
        return to_int16(samples).astype("<i2", copy=False).tobytes()
    out = io.BytesIO()
    soundfile.write(out, np.clip(samples, -1, 1), 8000, format="RAW", subtype=SUBTYPES[form])
    return out.getvalue()


def faded(samples: np.ndarray, start: float, end: float) -> np.ndarray:
    """Samples with a gain that goes from `start` to `end` in their course."""
    if start == end == 1.0:
        return samples
    return samples * np.linspace(start, end, len(samples), dtype=np.float32)
