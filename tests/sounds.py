"""Sound in files."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile


def encoded(samples: np.ndarray, form: str = "WAV", subtype: str | None = None, rate: int = 16000) -> bytes:
    """A whole file of samples [S] or [S, C]; WAV and FLAC are of 16 bits where no subtype is given."""
    whole = io.BytesIO()
    soundfile.write(whole, samples, rate, format=form, subtype=subtype)
    return whole.getvalue()


def by_ffmpeg(samples: np.ndarray, form: str, codec: str, rate: int = 16000, **options: str) -> bytes:
    """A file of samples [S] that FFmpeg writes."""
    place = tempfile.NamedTemporaryFile()  # noqa: SIM115
    with av.open(place.name, "w", format=form, options=options) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout="mono", bit_rate=64000)
        kind: Any = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="fltp", layout="mono")
        frame.sample_rate = rate
        for piece in [*kind.resample(frame), *kind.resample(None), None]:
            file.mux(stream.encode(piece))
    with place:
        return Path(place.name).read_bytes()
