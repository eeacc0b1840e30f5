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

    ratio = _ratio(source_rate, sample_rate, name)
    if source_rate == sample_rate:
        return audio
    length = -(-audio.shape[-1] * sample_rate // source_rate)
    if ratio == 1:
        converted = audio[..., :length]
    else:
        kernel, before = _filter(ratio.numerator, ratio.denominator)
        padded = torch.nn.functional.pad(audio, (before, before + ratio.numerator))
        converted = _convert(padded, kernel.to(audio.device), ratio.numerator)[..., :length]
    return torch.nn.functional.pad(converted, (0, length - converted.shape[-1]))


class StreamResampler:
    """`resample` of a sound [S] that is still coming: what `push` and `finish` return, joined, is that of the whole (to 1e-6).
    It holds back what its filter needs of the samples that follow, 6 zero crossings. UserError: as of `resample`."""

    def __init__(self, source_rate: int, sample_rate: int, *, name: str = "audio") -> None:
        import torch

        self._rates = source_rate, sample_rate
        ratio = _ratio(source_rate, sample_rate, name)
        self._source = ratio.numerator
        self._kernel: Tensor | None = None
        self._before = 0
        if ratio != 1:
            self._kernel, self._before = _filter(ratio.numerator, ratio.denominator)
        self._held = torch.zeros(self._before)
        self._ready = torch.zeros(0)  # beyond what the length so far says: of a filter whose ratio is beside that of the rates
        self._taken = self._returned = 0  # samples

    def push(self, audio: Tensor) -> Tensor:
        """Takes the next samples [S]; returns those at the other rate that no later one changes."""
        self._taken += len(audio)
        return self._next(audio)

    def finish(self) -> Tensor:
        """Returns the rest when the sound has ended; nothing may be pushed afterwards."""
        import torch

        out = self._next(torch.zeros(0 if self._kernel is None or not self._taken else self._before + self._source))
        return torch.nn.functional.pad(out, (0, self._length - self._returned))

    def _next(self, audio: Tensor) -> Tensor:
        import torch

        if self._kernel is not None:
            held = torch.cat([self._held, audio])
            count = max((len(held) - len(self._kernel)) // self._source + 1, 0)
            audio = _convert(held, self._kernel, self._source) if count else torch.zeros(0)
            self._held = held[count * self._source :].clone()
        ready = torch.cat([self._ready, audio]) if len(self._ready) else audio
        source, target = self._rates
        self._length = -(-self._taken * target // source)  # of what has come, at the other rate
        known = min(self._length - self._returned, len(ready))
        self._returned, self._ready = self._returned + known, ready[known:]
        return ready[:known]


def _ratio(source_rate: int, sample_rate: int, name: str) -> Fraction:
    """By how much the samples become fewer, as exactly as a filter can be made."""
    if source_rate < 1 or sample_rate < 1:
        raise UserError(f"{name}: cannot convert {source_rate} Hz to {sample_rate} Hz: rates start at 1")
    exact = Fraction(source_rate, sample_rate)
    # 44,101 to 16,000 Hz: by a ratio at most 0.05 % (a cent) beside it
    for ratio in (exact, exact.limit_denominator(max(1, isqrt(_CLOSE // ceil(exact))))):
        taps = ratio.numerator + 12 * ceil(ratio)  # samples that the filter spans
        if taps * ratio.denominator <= _MAX_KERNEL:
            return ratio
    raise UserError(
        f"{name}: {source_rate} Hz cannot be converted to {sample_rate} Hz: convert it to a usual rate first, such as 16000, "
        "22050, 24000, 44100 or 48000"
    )


def _convert(padded: Tensor, kernel: Tensor, source: int) -> Tensor:
    """Applies a filter [taps, target] at every `source` samples of [..., S]."""
    import torch

    frames = padded.unfold(-1, kernel.shape[0], source)  # [..., n, taps], each n gives `target` samples
    # In parts, because the product copies the frames, which overlap.
    return torch.cat([part @ kernel for part in frames.split(_FRAMES, dim=-2)], dim=-2).flatten(-2)


@lru_cache(maxsize=64)
def _filter(source: int, target: int) -> tuple[Tensor, int]:
    """Filter `[taps, target]` between two rates without a common divisor, and the samples it reaches back."""
    import torch
    import torchaudio

    made = torchaudio.transforms.Resample(source, target, dtype=torch.float64)
    return made.kernel[:, 0].T.float().contiguous(), made.width
