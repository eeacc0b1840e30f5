"""Does a spoken answer say what it should? Two independent recognisers.

`nearest` compares sound with sound: dynamic time warping (Sakoe and Chiba 1978) over log-mel frames, against reference
recordings of all answers. `Sphinx` recognises words with pocketsphinx under a small grammar; it is optional.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from omni.audio.io import resample
from omni.audio.mel import log_mel


def describe(audio: Tensor, sample_rate: int) -> Tensor:
    """Log-mel frames [T, n_mels] of a recording [S], one every 20 ms, without their mean (level and colour of the channel)."""
    if sample_rate != 16000:
        audio = resample(audio, sample_rate, 16000)
    if audio.numel() < 800:
        audio = torch.nn.functional.pad(audio, (0, 800 - audio.numel()))
    mel = log_mel(audio)[:, ::2].T
    return mel - mel.mean(0)


def dtw(query: Tensor, references: Sequence[Tensor]) -> Tensor:
    """Distance of query [T, C] to each reference [U, C] along the best alignment, divided by T + U; [len(references)].

    Steps (1, 0), (0, 1) and (1, 1), the diagonal counted twice (Sakoe and Chiba's symmetric form), so that every path has the
    length T + U. Diagonals of all references are worked at once.
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
    """Index of the reference that sounds most like the query; both as `describe` gives them."""
    return int(dtw(query, references).argmin())
