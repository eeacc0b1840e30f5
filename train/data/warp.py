"""Augmentation of log-mel features: cheap enough to be done anew each time an utterance is used.

Features are Whisper's, x = (log10(power) + 4) / 4, so power is at hand: noise is added as power, and the floor is set anew.

M mel bands, F feature frames.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


def warp(mel: Tensor, speed: float, bands: float) -> Tensor:
    """Play features [M, F] `speed` times as fast, and stretch them over the bands by `bands` as a shorter vocal tract would.

    Linear interpolation in both directions; [M, F'] with F' = F / speed. Source of the second: Jaitly and Hinton 2013,
    "Vocal Tract Length Perturbation", with a linear warp.
    """
    height, width = mel.shape
    out = max(1, int(width / speed))
    across = (torch.arange(out) * speed) * (2 / max(width - 1, 1)) - 1
    down = (torch.arange(height) * bands).clamp(max=height - 1) * (2 / (height - 1)) - 1
    grid = torch.stack([across.expand(height, out), down[:, None].expand(height, out)], dim=-1)
    return F.grid_sample(mel[None, None], grid[None], align_corners=True, padding_mode="border")[0, 0]


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


def add_feature_noise(mel: Tensor, level: float, tilt: float, generator: Generator) -> Tensor:
    """Add noise to features [M, F] as power, exponentially distributed as that of Gaussian noise is.

    Args:
        level: log10 of the noise's mean power in the middle band (speech peaks near 1).
        tilt: how much log10 of the power rises from the middle band to the highest.
    """
    floor = mel.amax() - 2.0  # Whisper's: 8 below the loudest band, in units of 4
    colour = 10 ** (level + tilt * torch.linspace(-1, 1, mel.shape[0]))[:, None]
    draws = torch.rand(mel.shape, generator=generator).clamp_(min=1e-4).log_().neg_()
    power = torch.exp((mel * 4 - 4) * 2.302585093).addcmul_(draws, colour.expand_as(mel))
    noisy = (power.log10_() + 4) / 4
    return torch.maximum(noisy, torch.maximum(floor, noisy.amax() - 2.0))
