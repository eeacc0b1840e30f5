"""Sound on the wire: PCM and G.711 to samples and back.

S samples, float32 within -1 to 1.
"""

from __future__ import annotations

import io

import numpy as np
import soundfile

from infer.samples import to_int16

SUBTYPES = {"audio/pcm": "PCM_16", "audio/pcmu": "ULAW", "audio/pcma": "ALAW"}
"""libsndfile's names of the formats that the Realtime API has."""


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
