"""Converts sound held in Python (tensors, arrays, lists, and the wrappers of data sets and user interfaces) to mono waveforms.

Dimensions: S samples, C channels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from copy import copy
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.audio.decode import full_scale
from omni.audio.io import MAX_SECONDS, ONE_CHANNEL, SAMPLE_RATE, cancelled, read_audio, shorten
from omni.audio.resample import StreamResampler, resample
from omni.errors import UserError, warn_about_sound

LOUDEST = 100.0
"""Largest sample that is accepted. Full scale is 1; samples far beyond it are usually integers (32768) given as floats by
mistake."""

_WAY = "give numbers as a tensor, an array or a list: [S], [1, S], [2, S] or [S, 2]"


def read_sound(
    sound: Any, sample_rate: Any, target: int = SAMPLE_RATE, *, max_seconds: float = MAX_SECONDS, name: str = "the question"
) -> Tensor:
    """Samples, or a sound file (see `AudioSource`), as mono `[S]` float32 at `target` samples per second.

    Args:
        sound: without the wrappers that `unwrap` removes.
        sample_rate: of samples; a file knows its own.
        name: of samples and open files in messages.

    UserError: neither of them, too long, not finite, too loud, or what `as_waveform` and `read_audio` refuse.
    """
    if isinstance(sound, (str, bytes, bytearray, memoryview, os.PathLike)) or hasattr(sound, "read"):
        clip = read_audio(sound, target, max_seconds=min(MAX_SECONDS, max_seconds))
        check_level(clip, shorten(os.fspath(sound)) if isinstance(sound, (str, os.PathLike)) else name)
        return clip
    if not is_waveform(sound):
        raise UserError(f"{name} is a {type(sound).__name__}; give a tensor [S] or a sound file")
    rate, samples = whole_rate(sample_rate, name), as_waveform(sound, name)
    if len(samples) / rate > max_seconds:  # before a rate of 1 Hz makes sixteen thousand samples of each
        raise UserError(
            f"{name} lasts {len(samples) / rate:.8g} s at {rate} Hz, and at most {max_seconds:g} s are taken; cut it into "
            "pieces, or correct the sample rate"
        )
    check_level(samples, name)  # before resampling, which adds samples up
    return resample(samples, rate, target, name=name)


class SoundPieces:
    """`read_sound` of samples that are still coming: what `push` and `finish` return, joined, is mono [S] at 16 kHz. UserError:
    a rate that cannot be converted."""

    def __init__(self, rate: int) -> None:
        self._rate = StreamResampler(rate, SAMPLE_RATE, name="the question")
        self._mixed, self._channels = 0.0, np.zeros(2)  # energies, of two channels

    def copy(self) -> SoundPieces:
        """An independent copy, which takes further pieces by itself."""
        copied = copy(self)
        copied._rate, copied._channels = copy(self._rate), self._channels.copy()
        return copied

    def push(self, piece: np.ndarray) -> Tensor:
        """Takes the next samples, [S] or [2, S], as `as_piece` scales them; returns those that no later one changes."""
        mixed = piece
        if piece.ndim == 2:
            mixed = piece.mean(axis=0)
            self._mixed += float(np.square(mixed).sum())
            self._channels += np.square(piece).sum(axis=1)
        return self._rate.push(torch.from_numpy(mixed))

    def finish(self) -> Tensor | None:
        """The rest; None where two channels cancel each other, so that the whole is to be read by `as_waveform`."""
        if self._channels.any() and cancelled(self._mixed, self._channels.tolist()) is not None:
            return None
        return self._rate.finish()


def check_level(clip: Tensor, name: str = "the question") -> None:
    """Refuse sound with samples that are not finite, or beyond `LOUDEST` (UserError)."""
    loudest = float(torch.stack(torch.aminmax(clip)).abs().max()) if len(clip) else 0.0
    if not math.isfinite(loudest):
        raise UserError(f"{name} holds samples that are not finite numbers; was it divided by a zero level?")
    if loudest > LOUDEST:
        raise UserError(
            f"{name} has a sample of {loudest:.4g}, but sound lies between -1 and 1 (at most {LOUDEST:g} is taken); "
            "divide it by its full scale, which is 32768 for samples of 16 bits"
        )


def unwrap(sound: Any, sample_rate: Any, name: str = "the question") -> tuple[Any, Any]:
    """Extracts the sound itself and its sample rate from `(rate, samples)` in either order, `{"array", "sampling_rate"}`,
    `{"bytes"}`, `{"path"}`, and any of them under `"audio"`; other values are returned unchanged. UserError: a mapping
    without sound."""
    if isinstance(sound, Mapping):
        keys = sound.keys()
        if "audio" in keys and "array" not in keys:
            return unwrap(sound["audio"], sample_rate, name)
        if "array" in keys:
            if sound.get("sampling_rate") is None:
                raise UserError(f"{name} has an 'array' but no 'sampling_rate'; give both")
            return sound["array"], sound["sampling_rate"]
        for key in ("bytes", "path"):
            if sound.get(key) is not None:
                return sound[key], sample_rate
        raise UserError(f"{name} is a mapping with the keys {list(keys)[:8]}; it needs 'array' and 'sampling_rate', or 'audio'")
    if isinstance(sound, (tuple, list)) and len(sound) == 2:
        for rate, samples in (sound, sound[::-1]):
            several = isinstance(samples, (list, tuple)) or (is_waveform(samples) and np.ndim(samples) > 0)
            if several and isinstance(rate, Real) and not isinstance(rate, bool):
                return samples, rate
    return sound, sample_rate


def is_waveform(sound: Any) -> bool:
    """Whether `sound` holds samples as numbers: a tensor, an array, or a list or tuple."""
    return isinstance(sound, (Tensor, np.ndarray, list, tuple)) or (
        hasattr(sound, "__array__") and not isinstance(sound, (str, bytes))
    )


def whole_rate(sample_rate: Any, name: str = "the question") -> int:
    """A sample rate as a whole number; UserError: none, or below 1."""
    try:
        rate = None if isinstance(sample_rate, (bool, str, bytes)) else int(sample_rate)
    except (TypeError, ValueError, OverflowError):
        rate = None
    if rate is None or rate != sample_rate:
        raise UserError(f"{name}'s sample rate is {str(sample_rate)[:40]!r}; it must be a whole number of Hz")
    if rate < 1:
        raise UserError(f"{name}'s sample rate is {rate} Hz; it must be positive")
    return rate


def as_waveform(samples: Any, name: str = "the question") -> Tensor:
    """Converts numbers to mono `[S]` float32 on the host, full scale being 1. Integers are divided by the range of their type
    (uint8 is centred at 128); those of 64 bits, as in lists, count as 16-bit samples. Two channels are averaged, or the louder
    is taken where they cancel each other (SoundWarning). UserError: no numbers, complex ones, no samples, or a shape that is
    not clear."""
    array = _numbers(samples, name)
    if not array.size:
        raise UserError(f"{name} has no samples; give at least some milliseconds of sound")
    scaled = _scaled(array, name)
    if scaled.ndim == 1:
        return torch.from_numpy(scaled)
    mixed = scaled.mean(axis=0)
    loudest = cancelled(float(np.square(mixed).sum()), np.square(scaled).sum(axis=1).tolist())
    if loudest is None:
        return torch.from_numpy(mixed)
    warn_about_sound(f"{name}'s {ONE_CHANNEL.format(loudest)}")
    return torch.from_numpy(scaled[loudest].copy())


def as_piece(
    samples: Any, name: str, check: Callable[[int], None] | None = None, two: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A copy of the numbers of a piece of sound, [S] or [2, S], and the same as float32, full scale being 1; a piece may be
    empty.

    Args:
        check: called with the number of samples before memory is taken for them.
        two: the dimension of two channels, where the pieces before said so: of one or two samples that is not clear.

    UserError: as of `as_waveform`, or samples that are not finite or too loud.
    """
    if not is_waveform(samples):
        raise UserError(f"{name} is a {type(samples).__name__}; {_WAY}")
    array = _numbers(samples, name, two)
    if check is not None:
        check(array.shape[-1])
    array = array.copy()
    if not array.size:
        return array, np.zeros(array.shape, np.float32)
    scaled = _scaled(array, name)
    check_level(torch.from_numpy(scaled.reshape(-1)), name)
    return array, scaled


def _numbers(samples: Any, name: str, two: int | None = None) -> np.ndarray:
    """Samples as an array [S] or [2, S] of a type that sound may have."""
    try:
        if isinstance(samples, Tensor):
            samples = samples.detach().cpu().resolve_conj()
            samples = samples.float() if samples.dtype == torch.bfloat16 else samples
        array = np.asarray(samples)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # lists of lists of unequal lengths, for example
        raise UserError(f"{name} is a {type(samples).__name__} that is no array of numbers; {_WAY}") from error
    if array.dtype.kind not in "iuf" or array.dtype.name in ("uint16", "uint32", "uint64"):
        raise UserError(f"{name}'s samples are of type {array.dtype}; give floating-point numbers or signed integers")
    if two is not None and array.ndim == 2 and array.shape[two] == 2:
        return array.T if two else array
    return _channels(array, name)


def _channels(array: np.ndarray, name: str) -> np.ndarray:
    """Brings an array of one or two channels, in either order, to `[S]` or `[2, S]`."""
    shape = list(array.shape)
    if array.ndim == 2 and 1 in shape:
        return array.reshape(-1)
    if array.ndim == 2 and 0 not in shape and shape.count(2) == 1:
        return array if shape[0] == 2 else array.T
    if shape == [2, 2]:
        raise UserError(f"{name} has shape [2, 2], two samples of two channels in either order; give one channel, [samples]")
    if array.ndim == 2 and 0 not in shape:
        raise UserError(f"{name} has shape {shape}, {min(shape)} channels, and only one or two are taken; give one, [samples]")
    if array.ndim != 1 and array.size:
        raise UserError(f"{name} has shape {shape}; {_WAY}")
    return array.reshape(-1)


def _scaled(array: np.ndarray, name: str) -> np.ndarray:
    """Samples as float32, full scale being 1; numbers of 64 bits count as 16-bit samples."""
    if array.dtype == np.int64:
        for extreme in (int(array.min()), int(array.max())):
            if abs(extreme) > 1 << 15:
                raise UserError(f"{name} holds {extreme}, but numbers of type int64 count as 16 bits; give int32 or float")
        return array.astype(np.float32) / (1 << 15)
    return full_scale(array)
