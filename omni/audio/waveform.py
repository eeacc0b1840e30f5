"""Sound that Python holds (tensors, arrays, lists, and what data sets and user interfaces wrap them in) as one mono waveform.

Dimensions: S samples, C channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.audio.level import cancelled
from omni.errors import SoundWarning, UserError

_SCALES = {"int8": 1 << 7, "int16": 1 << 15, "int32": 1 << 31}
_WAY = "give numbers as a tensor, an array or a list: [S], [1, S], [2, S] or [S, 2]"


def unwrap(question: Any, sample_rate: Any) -> tuple[Any, Any]:
    """The sound itself and its sample rate, out of `(rate, samples)` in either order, `{"array", "sampling_rate"}`,
    `{"bytes"}`, `{"path"}`, and any of them under `"audio"`; other things come back as they are. UserError: a mapping
    without sound."""
    if isinstance(question, Mapping):
        keys = question.keys()
        if "audio" in keys and "array" not in keys:
            return unwrap(question["audio"], sample_rate)
        if "array" in keys:
            if question.get("sampling_rate") is None:
                raise UserError("the question has an 'array' but no 'sampling_rate'; give both")
            return question["array"], question["sampling_rate"]
        for key in ("bytes", "path"):
            if question.get(key) is not None:
                return question[key], sample_rate
        raise UserError(
            f"the question is a mapping with the keys {list(keys)[:8]}; it needs 'array' and 'sampling_rate', or 'audio'"
        )
    if isinstance(question, (tuple, list)) and len(question) == 2:
        first, second = question
        if _is_rate(first) and _is_samples(second):
            return second, first
        if _is_rate(second) and _is_samples(first):
            return first, second
    return question, sample_rate


def is_waveform(question: Any) -> bool:
    """Whether it is something that holds numbers: a tensor, an array, or a list or tuple."""
    return isinstance(question, (Tensor, np.ndarray, list, tuple)) or (
        hasattr(question, "__array__") and not isinstance(question, (str, bytes))
    )


def whole_rate(sample_rate: Any) -> int:
    """A sample rate as a whole number; UserError: none, or below 1."""
    try:
        rate = None if isinstance(sample_rate, (bool, str, bytes)) else int(sample_rate)
    except (TypeError, ValueError, OverflowError):
        rate = None
    if rate is None or rate != sample_rate:
        raise UserError(f"the question's sample rate is {str(sample_rate)[:40]!r}; it must be a whole number of Hz")
    if rate < 1:
        raise UserError(f"the question's sample rate is {rate} Hz; it must be positive")
    return rate


def as_waveform(samples: Any) -> Tensor:
    """Numbers as mono `[S]` float32 on the host, full scale being 1.

    Integers are divided by the range of their type (uint8 is centred at 128); those of 64 bits, as in lists, count as 16-bit
    samples. Two channels are averaged, or the louder is taken where they cancel each other (SoundWarning).
    UserError: no numbers, complex ones, no samples, or a shape that is not clear.
    """
    array = _array(samples)
    if array.dtype.kind not in "iuf" or array.dtype.name in ("uint16", "uint32", "uint64"):
        raise UserError(f"the question's samples are of type {array.dtype}; give floating-point numbers or signed integers")
    array = _channels(array)
    if not array.size:
        raise UserError("the question has no samples; give at least some milliseconds of sound")
    scaled = _scaled(array)
    if scaled.ndim == 1:
        return torch.from_numpy(scaled)
    mixed = scaled.mean(axis=0)
    loudest = cancelled(float(np.square(mixed).sum()), np.square(scaled).sum(axis=1).tolist())
    if loudest is None:
        return torch.from_numpy(mixed)
    warnings.warn(
        f"the question's two channels are of opposite phase and cancel each other; channel {loudest} is heard alone",
        SoundWarning,
        stacklevel=2,
    )
    return torch.from_numpy(scaled[loudest].copy())


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_samples(value: Any) -> bool:
    return is_waveform(value) and (isinstance(value, (list, tuple)) or np.ndim(value) > 0)


def _array(samples: Any) -> np.ndarray:
    """Anything that holds numbers as an array on the host."""
    if isinstance(samples, Tensor):
        samples = samples.detach().cpu().resolve_conj()
        return (samples.float() if samples.dtype == torch.bfloat16 else samples).numpy()
    try:
        return np.asarray(samples)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # lists of lists of unequal lengths, for example
        raise UserError(f"the question is a {type(samples).__name__} that is no array of numbers; {_WAY}") from error


def _channels(array: np.ndarray) -> np.ndarray:
    """`[S]`, or `[2, S]`, of what has one or two channels in either order."""
    shape = list(array.shape)
    if array.ndim == 2 and 1 in shape:
        return array.reshape(-1)
    if array.ndim == 2 and 0 not in shape and shape.count(2) == 1:
        return array if shape[0] == 2 else array.T
    if array.ndim == 2 and 0 not in shape and shape != [2, 2]:
        raise UserError(
            f"the question has shape {shape}, {min(shape)} channels, and only one or two are heard; give one, [samples]"
        )
    if array.ndim != 1 and array.size:
        raise UserError(f"the question has shape {shape}; {_WAY}")
    return array.reshape(-1)


def _scaled(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype == np.uint8:
        return (array.astype(np.float32) - 128) / 128
    if array.dtype == np.int64:
        for extreme in (int(array.min()), int(array.max())):
            if abs(extreme) > 1 << 15:
                raise UserError(
                    f"the question holds the whole number {extreme}, beyond 16 bits; give samples as int32 or float"
                )
        return array.astype(np.float32) / (1 << 15)
    return array.astype(np.float32) / _SCALES[array.dtype.name]
