"""The ears: time warping against a slow reference, and what it should and should not hear."""

from __future__ import annotations

import math

import torch

from train.scoring.asr import Sphinx, describe, dtw, nearest


def slow_dtw(a: torch.Tensor, b: torch.Tensor) -> float:
    total = [[math.inf] * (len(b) + 1) for _ in range(len(a) + 1)]
    total[0][0] = 0.0
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            d = float((a[i - 1] - b[j - 1]).norm())
            total[i][j] = min(total[i - 1][j] + d, total[i][j - 1] + d, total[i - 1][j - 1] + 2 * d)
    return total[-1][-1] / (len(a) + len(b))


def test_dtw_equals_the_slow_reference():
    torch.manual_seed(0)
    query = torch.randn(7, 3)
    references = [torch.randn(n, 3) for n in (1, 4, 7, 12)]
    wanted = torch.tensor([slow_dtw(query, r) for r in references])
    torch.testing.assert_close(dtw(query, references), wanted, rtol=1e-5, atol=1e-6)


def test_a_slower_saying_of_the_same_is_nearest():
    time = torch.linspace(0, 1, 8000)
    up, down = torch.sin(2000 * time * (1 + time)), torch.sin(2000 * time * (3 - time))
    slow = torch.linspace(0, 1, 11000)
    query = torch.sin(2000 * slow * (1 + slow)) * 0.1  # longer and quieter
    references = [describe(x, 8000) for x in (down, up, torch.randn(8000) * 0.1)]
    assert nearest(describe(query, 8000), references) == 1


def test_sphinx_hears_a_spoken_number():
    from train.data.tts.espeak import synthesise

    ear = Sphinx(["one", "two", "three", "four", "seven"])
    audio, rate = synthesise("seven", voice="en-us+f3", rate=160)
    assert ear.transcribe(audio, rate) == "seven"
    assert ear.transcribe(torch.zeros(8000), 16000) in ("", *["one", "two", "three", "four", "seven"])
