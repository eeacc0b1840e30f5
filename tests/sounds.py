"""Sound in files."""

from __future__ import annotations

import io

import numpy as np
import soundfile


def encoded(samples: np.ndarray, form: str = "WAV", subtype: str | None = None, rate: int = 16000) -> bytes:
    """A whole file of samples [S] or [S, C]; WAV and FLAC are of 16 bits where no subtype is given."""
    whole = io.BytesIO()
    soundfile.write(whole, samples, rate, format=form, subtype=subtype)
    return whole.getvalue()
