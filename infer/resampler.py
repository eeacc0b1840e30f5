"""Resampling of sound that is still coming.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from av.audio.frame import AudioFrame
from av.filter import Graph


class Resampler:
    """Samples at another rate, piece by piece, by FFmpeg's resampler, which holds back 2 ms (soxr's best holds 33); nothing is
    changed where the rates are the same.

    Args:
        given, wanted: samples per second.
    """

    def __init__(self, given: int, wanted: int) -> None:
        self._given, self._pts = given, 0
        self._filter = None if given == wanted else _resampling(given, wanted)

    def push(self, samples: np.ndarray) -> np.ndarray:
        """What is known after more samples."""
        if self._filter is None or not len(samples):
            return samples
        frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples, dtype=np.float32)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = self._given, self._pts, Fraction(1, self._given)
        self._pts += len(samples)
        self._filter.push(frame)
        return _pulled(self._filter)

    def finish(self) -> np.ndarray:
        """The rest; nothing may be pushed afterwards."""
        if self._filter is None or not self._pts:
            return np.zeros(0, np.float32)
        self._filter.push(None)
        return _pulled(self._filter)


def _resampling(given: int, wanted: int) -> Graph:
    """FFmpeg's filters; av's own resampler would start threads for each, up to sixteen."""
    graph = Graph()
    graph.threads = 1
    source = graph.add("abuffer", sample_rate=str(given), sample_fmt="fltp", channel_layout="mono", time_base=f"1/{given}")
    resample, sink = graph.add("aresample", str(wanted)), graph.add("abuffersink")
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
