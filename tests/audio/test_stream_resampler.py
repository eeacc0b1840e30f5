"""Sound that is resampled while it comes equals the whole, resampled."""

from __future__ import annotations

import random

import pytest
import torch

from omni.audio.resample import StreamResampler, resample

RATES = [(24_000, 16_000), (8_000, 16_000), (44_100, 16_000), (48_000, 16_000), (16_000, 16_000), (16_000, 24_000)]
ODD = [(44_101, 16_000), (16_001, 16_000), (15_999, 16_000), (1, 16), (7_919, 16_000)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("given", "wanted"), RATES + ODD)
@pytest.mark.parametrize("samples", [0, 1, 2, 700, 30_001])
def test_any_split_equals_the_whole(given: int, wanted: int, samples: int) -> None:
    audio = torch.randn(samples, generator=torch.Generator().manual_seed(samples)) * 0.3
    whole = resample(audio, given, wanted)
    for most in (2, 300, 40_000):
        if samples > 1000 and most == 2:
            continue
        draw, at, stream, out = random.Random(most), 0, StreamResampler(given, wanted), list[torch.Tensor]()
        while at < samples:
            size = draw.randrange(most)
            out.append(stream.push(audio[at : at + size]))
            at += size
        out.append(stream.finish())
        torch.testing.assert_close(torch.cat(out), whole, rtol=1e-6, atol=1e-6)


def test_only_what_the_filter_needs_is_held_back() -> None:
    stream, given = StreamResampler(24_000, 16_000), 0
    for n in range(1, 100):
        given += len(stream.push(torch.ones(240)))
        assert 160 * n - given <= 10
    assert len(stream._held) < 100
