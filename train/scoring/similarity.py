"""Recognises a spoken answer by its distance to reference recordings of all answers, without ASR.

`nearest` compares sound with sound: dynamic time warping (Sakoe and Chiba 1978) over log-mel frames. `train.scoring.asr.Sphinx`
is the independent second recogniser: words by pocketsphinx under a small grammar; it is optional.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from omni.audio.mel import log_mel
from omni.audio.resample import resample


def describe(audio: Tensor, sample_rate: int) -> Tensor:
    """Compute log-mel frames [T, n_mels] of a recording [S], one every 20 ms, less their mean over time (channel and level)."""
    if sample_rate != 16000:
        audio = resample(audio, sample_rate, 16000)
    if audio.numel() < 800:
        audio = torch.nn.functional.pad(audio, (0, 800 - audio.numel()))
    mel = log_mel(audio)[:, ::2].T
    return mel - mel.mean(0)


def dtw(query: Tensor, references: Sequence[Tensor]) -> Tensor:
    """Distance of query [T, C] to each reference [U, C] along the best alignment, divided by T + U; [len(references)].

    Steps (1, 0), (0, 1) and (1, 1), the diagonal counted twice (Sakoe and Chiba's symmetric form), so that every path has the
    length T + U. Each diagonal is computed for all references at once.
    """
    lengths = torch.tensor([len(r) for r in references])
    padded = pad_sequence(list(references), batch_first=True)
    cost = torch.cdist(query[None], padded)  # [R, T, U]
    n, t, u = cost.shape
    total = torch.full((n, t + 1, u + 1), torch.inf)
    total[:, 0, 0] = 0
    for diagonal in range(t + u - 1):
        i = torch.arange(max(0, diagonal - u + 1), min(t, diagonal + 1))
        j = diagonal - i
        here = cost[:, i, j]
        best = torch.minimum(total[:, i, j + 1], total[:, i + 1, j]) + here
        total[:, i + 1, j + 1] = torch.minimum(best, total[:, i, j] + 2 * here)
    return total[torch.arange(n), t, lengths] / (t + lengths)


def nearest(query: Tensor, references: Sequence[Tensor]) -> int:
    """Index of the reference at the least `dtw` distance to the query; both are frames of `describe`."""
    return int(dtw(query, references).argmin())
