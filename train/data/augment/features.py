"""Augmentation of log-mel features, cheap enough to be done each time an utterance is used.

Features are Whisper's, x = (log10(power) + 4) / 4, from which power is recovered: noise is added as power, and Whisper's floor
is applied again.

M mel bands, F feature frames.
"""

from __future__ import annotations

from functools import lru_cache
from math import log

import numpy as np
import torch
from torch import Generator, Tensor

_LN10 = log(10.0)


def warp(mel: Tensor, speed: float, bands: float) -> Tensor:
    """Play features [M, F] `speed` times as fast, and stretch them over the bands by `bands` as a shorter vocal tract would.

    Linear interpolation in both directions; [M, F'] with F' = F / speed. Source of the second: Jaitly and Hinton 2013,
    "Vocal Tract Length Perturbation", with a linear warp.
    """
    out = max(1, int(mel.shape[1] / speed))
    return torch.from_numpy(_stretched(_stretched(mel.numpy(), 1, speed, out), 0, bands, mel.shape[0]))


def _stretched(x: np.ndarray, axis: int, factor: float, size: int) -> np.ndarray:
    """Interpolate `size` values along an axis, `factor` apart; beyond the end, the last value is repeated.

    In NumPy, whose calls cost less than PyTorch's for arrays as small as these.
    """
    last = x.shape[axis] - 1
    place = np.minimum(np.arange(size, dtype=np.float32) * np.float32(factor), last)
    low = place.astype(np.intp)
    share = place - low
    out = x.take(np.minimum(low + 1, last), axis)
    below = x.take(low, axis)
    out -= below
    out *= share if axis else share[:, None]
    out += below
    return out


def shape(mel: Tensor, decibels: float, generator: Generator, curves: int = 5) -> Tensor:
    """Colour features [M, F] as another microphone or room would: a smooth gain over the bands, the same in every frame.

    The gain is a sum of `curves` cosines over the bands, of half a period and up, with normal weights that fall as one over
    their number; its standard deviation over bands and draws is about `decibels`.
    """
    bands = mel.shape[0]
    place = (torch.arange(bands) + 0.5) * (torch.pi / bands)
    number = torch.arange(1, curves + 1)
    weights = torch.randn(curves, generator=generator) / number
    gain = weights @ torch.cos(number[:, None] * place)
    scale = decibels / 40.0 / float((0.5 / number.double().square()).sum().sqrt())  # a feature is log10 of power, over 4
    return mel + (gain * scale)[:, None]


def add_echo(mel: Tensor, frames: float, decibels: float) -> Tensor:
    """Add an echo to features [M, F]: every frame's power is added to the following frames, decaying exponentially.

    Args:
        frames: frames in which the echo falls by 60 dB.
        decibels: power of the whole echo relative to the sound's, whatever its length.

    The exponential decay is that of a diffuse room (Polack 1988); phases are not kept, powers add.
    """
    x = mel.numpy()
    fall = 10.0 ** (-6.0 / frames)
    late = np.arange(x.shape[1], dtype=np.float32)
    late = late[None, :] - late[:, None] - 1  # [from, to]: frames since the first frame of the echo
    weights = np.where(late >= 0, np.float32(10 ** (decibels / 10) * (1 - fall)) * np.float32(fall) ** np.maximum(late, 0), 0)
    power = np.exp((x - 1) * np.float32(4 * _LN10))
    # By PyTorch, which data workers limit to one thread; NumPy would occupy all cores.
    power += (torch.from_numpy(power) @ torch.from_numpy(weights.astype(np.float32))).numpy()
    return torch.from_numpy(1 + np.log(power, out=power) * np.float32(0.25 / _LN10))


def add_feature_noise(mel: Tensor, level: float, tilt: float, generator: Generator, floor: float | None = None) -> Tensor:
    """Add noise to features [M, F] as power, exponentially distributed as that of Gaussian noise is.

    Args:
        level: log10 of the noise's mean power in the middle band (speech peaks near 1).
        tilt: how much log10 of the power rises from the middle band to the highest.
        floor: least value of a feature; None for Whisper's, which follows from the clip.
    """
    x = mel.numpy()
    draws = _exponential()
    if x.size > len(draws):
        noise = torch.empty(x.shape).exponential_(generator=generator).numpy()
    else:  # a slice of the kept draws, at a tenth of the cost of new ones
        start = int(torch.randint(len(draws) - x.size + 1, (), generator=generator))
        noise = draws[start : start + x.size].reshape(x.shape)
    colour = np.exp(_LN10 * (level + tilt * np.linspace(-1, 1, len(x), dtype=np.float32)))
    power = np.exp((x - 1) * np.float32(4 * _LN10))
    power += noise * colour[:, None].astype(np.float32)
    noisy = np.log(power, out=power)
    noisy *= np.float32(0.25 / _LN10)
    noisy += 1
    if floor is None:
        floor = max(x.max(), noisy.max()) - 2  # 8 below the loudest band, in units of 4
    return torch.from_numpy(np.maximum(noisy, floor, out=noisy))


@lru_cache(maxsize=1)
def _exponential() -> np.ndarray:
    """A million draws from the exponential distribution of mean 1, always the same."""
    return torch.empty(1 << 20).exponential_(generator=torch.Generator().manual_seed(0)).clamp_(min=1e-4).numpy()
