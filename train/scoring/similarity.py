"""Does a spoken answer say what it should? Two independent ears.

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
from omni.errors import UserError


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


class Sphinx:
    """pocketsphinx with a grammar of one rule: a sequence of the given words.

    Every recording is heard as if it were the first: what pocketsphinx learns of its level is then forgotten.

    Args:
        words: what may be said, each any number of times, at most `longest` in all.
    """

    def __init__(self, words: Sequence[str], longest: int = 4) -> None:
        try:
            from pocketsphinx import Decoder
        except ImportError as error:
            raise UserError('pocketsphinx is not installed; run: pip install "omni-speech[demo]"') from error
        some = "(" + " | ".join(sorted(set(words))) + ")"
        rule = some + f" [{some}]" * (longest - 1)
        grammar = f"#JSGF V1.0;\ngrammar answers;\npublic <answer> = {rule};\n"
        self._decoder = Decoder(lm=None, loglevel="FATAL", samprate=16000)
        self._decoder.add_jsgf_string("answers", grammar)
        self._decoder.activate_search("answers")

    def hear(self, audio: Tensor, sample_rate: int) -> str:
        """The words heard in a recording [S]; empty where the grammar fits nothing."""
        if sample_rate != 16000:
            audio = resample(audio, sample_rate, 16000)
        quiet = torch.zeros(4000)
        audio = torch.cat([quiet, audio / audio.abs().max().clamp_min(1e-3) * 0.7, quiet])
        self._decoder.reinit_feat()
        self._decoder.activate_search("answers")
        self._decoder.start_utt()
        self._decoder.process_raw((audio * 32767).short().numpy().tobytes(), full_utt=True)
        self._decoder.end_utt()
        best = self._decoder.hyp()
        return "" if best is None else " ".join(w.split("(")[0] for w in best.hypstr.split())
