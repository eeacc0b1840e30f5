"""Turns sound into the inputs of the encoder's `forward`. Needs only the configuration, so that data workers run it
without a model.

S samples, M mel bands, F feature frames, N clips.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from omni.audio.mel import log_mel
from omni.encoder.config import EncoderConfig
from omni.errors import UserError


def split(audio: Tensor, config: EncoderConfig) -> list[Tensor]:
    """Cut `[S]` into the encoder's clips: one, or consecutive windows where `long_audio` is "split".

    UserError: no samples, or longer than the window where it is "refuse".
    """
    if audio.ndim != 1:
        raise UserError(f"sound of shape {list(audio.shape)} for the encoder: give one channel, [samples]")
    return list(audio.split(config.clips(audio.shape[0])))


@torch.no_grad()
def features(audio: Tensor, config: EncoderConfig) -> Tensor:
    """Log-mel `[M, F]` float32 of one clip `[S]` at 16 kHz, F = `config.mel_frames(S)`.

    padded: silence is appended up to the window first, as Whisper does.
    UserError: no samples, or longer than the window (`split` it first).
    """
    if audio.ndim != 1:
        raise UserError(f"sound of shape {list(audio.shape)} for the encoder: give one channel, [samples]")
    samples = audio.shape[0]
    if samples > config.max_samples:
        config.clips(samples)  # refuses where the configuration does
        raise UserError(f"a clip of {samples} samples exceeds the window of {config.max_samples}: split() it first")
    if config.mode == "padded":
        audio = torch.nn.functional.pad(audio, (0, config.max_samples - samples))
    return log_mel(audio, config.n_mels, config.mel_floor, config.hop)


def collate(mels: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Batches clips `[M, F]` as `[N, M, F max]`, zeros behind the shorter ones; also returns their lengths F."""
    lengths = [mel.shape[1] for mel in mels]
    batch = mels[0].new_zeros(len(mels), mels[0].shape[0], max(lengths))
    for row, mel in zip(batch, mels, strict=True):
        row[:, : mel.shape[1]] = mel
    return batch, lengths
