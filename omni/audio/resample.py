"""Resamples sound from one sample rate to another.

Dimensions: S samples.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil, isqrt
from typing import TYPE_CHECKING

from omni.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_FRAMES = 1 << 17  # frames of a resampling product done at a time
_MAX_KERNEL = 1 << 24  # elements of a resampling kernel; only rates without a common divisor come near
_CLOSE = 1 << 22  # elements of the kernel that is then used in their place


def resample(audio: Tensor, source_rate: int, sample_rate: int, *, name: str = "audio") -> Tensor:
    """Convert `[..., S]` float32 from any rate to any other: `[..., ceil(S * sample_rate / source_rate)]`.

    The filter is `torchaudio.functional.resample`'s default (windowed sinc, 6 zero crossings a side), made
    once for each pair of rates and applied as one matrix product: torchaudio's convolution is planned again
    for every length that it has not met, which costs up to fifteen times the product (22,050 to 16,000 Hz,
    two seconds). UserError, which calls the sound `name`: a rate below 1, or two whose filter would be too large.
    """
    import torch

    if source_rate < 1 or sample_rate < 1:
        raise UserError(f"{name}: cannot convert {source_rate} Hz to {sample_rate} Hz: rates start at 1")
    if source_rate == sample_rate:
        return audio
    ratio = Fraction(source_rate, sample_rate)
    if _taps(ratio) * ratio.denominator > _MAX_KERNEL:  # 44,101 to 16,000 Hz: by a ratio at most 0.05 % (a cent) beside it
        ratio = ratio.limit_denominator(max(1, isqrt(_CLOSE // ceil(ratio))))
    source, target = ratio.numerator, ratio.denominator
    if _taps(ratio) * target > _MAX_KERNEL:
        raise UserError(
            f"{name}: {source_rate} Hz cannot be converted to {sample_rate} Hz: convert it to a usual rate first, such as "
            "16000, 22050, 24000, 44100 or 48000"
        )
    length = -(-audio.shape[-1] * sample_rate // source_rate)
    kernel, before = _filter(source, target)
    padded = torch.nn.functional.pad(audio, (before, before + source))
    kernel = kernel.to(audio.device)
    frames = padded.unfold(-1, kernel.shape[0], source)  # [..., n, taps], each n gives `target` samples
    # In parts, because the product copies the frames, which overlap.
    converted = torch.cat([part @ kernel for part in frames.split(_FRAMES, dim=-2)], dim=-2)
    converted = converted.flatten(-2)[..., :length]
    return torch.nn.functional.pad(converted, (0, length - converted.shape[-1]))


def _taps(ratio: Fraction) -> int:
    """Number of samples that a filter spans."""
    return ratio.numerator + 12 * ceil(ratio)


@lru_cache(maxsize=64)
def _filter(source: int, target: int) -> tuple[Tensor, int]:
    """Filter `[taps, target]` between two rates without a common divisor, and the samples it reaches back."""
    import torch
    import torchaudio

    made = torchaudio.transforms.Resample(source, target, dtype=torch.float64)
    return made.kernel[:, 0].T.float().contiguous(), made.width
