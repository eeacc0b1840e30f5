"""Log-mel features as Whisper's encoder expects them: 100 frames a second of 16 kHz sound.

Formula: short-time Fourier transform (Hann window of 400 samples every 160, the sound mirrored at both edges), power, Whisper's
own mel filters, log10, a floor, then (x + 4) / 4: `whisper.audio.log_mel_spectrogram` of the `openai-whisper` package.

S samples, M mel bands, F feature frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from omni.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 400
"""Samples under one frame (25 ms)."""
HOP = 160
"""Samples between frames (10 ms)."""
MIN_SAMPLES = WINDOW // 2 + 1
"""Shortest sound whose edges can be mirrored; shorter ones, and those under one hop, are followed by silence."""

FIXED_FLOOR = -7.0
"""Floor, in log10 of power, of `floor="fixed"`: 8 below the loudest band of ordinary recorded speech (about +1), where
`floor="clip"` would put it, and 2 above the rounding noise of 16-bit samples (about -9.5)."""

LOWEST = (FIXED_FLOOR + 4) / 4
"""`FIXED_FLOOR` as a feature."""

MelFloor = Literal["clip", "fixed"]


def mel_frames(samples: int, hop: int = HOP) -> int:
    """Number of frames F that `log_mel` makes of that many samples: S // hop, and at least one."""
    return max(samples // hop, 1)


def log_mel(audio: Tensor, n_mels: int = 80, floor: MelFloor = "clip", hop: int = HOP, before: Tensor | None = None) -> Tensor:
    """Features `[..., M, F]` float32 of 16 kHz sound `[..., S]`, F = `mel_frames(S, hop)`. UserError: no samples, or a value
    that is none of these.

    Args:
        n_mels: 80 or 128, the banks that Whisper ships.
        floor: "clip" bounds features at 8 below their clip's loudest band, as Whisper does, so the first ones depend on the
            clip's end. "fixed" bounds them at `FIXED_FLOOR`: all but the last are final once their window is full.
        hop: samples between frames, 160 for Whisper.
        before: the `WINDOW - hop` samples before these. Each frame then ends with its hop (at Whisper's, its centre is
            2.5 ms earlier), and nothing is mirrored.
    """
    import torch
    from whisper.audio import mel_filters

    if audio.shape[-1] == 0:
        raise UserError("no samples to make features of: give at least one")
    if n_mels not in (80, 128):
        raise UserError(f"n_mels={n_mels}: Whisper's filter banks have 80 or 128 bands")
    if floor not in ("clip", "fixed"):
        raise UserError(f"mel floor {floor!r} is unknown: clip or fixed")
    audio, shortest = audio.float(), hop if before is not None else max(MIN_SAMPLES, hop)
    if audio.shape[-1] < shortest:
        audio = torch.nn.functional.pad(audio, (0, shortest - audio.shape[-1]))
    frames, centred = mel_frames(audio.shape[-1], hop), before is None
    if before is not None:
        audio = torch.cat([before, audio], dim=-1)
    # Mixed precision must not reach the filters: bf16 keeps 3 digits of a power that spans 10 decades.
    with torch.autocast(audio.device.type, enabled=False):
        window = torch.hann_window(WINDOW, device=audio.device)
        spectrum = torch.stft(audio, WINDOW, hop, window=window, center=centred, pad_mode="reflect", return_complex=True)
        power = spectrum[..., :frames].abs() ** 2  # Whisper drops the frame at the end
        log = (mel_filters(audio.device, n_mels) @ power).clamp(min=1e-10).log10()
    if floor == "fixed":
        return (log.clamp(min=FIXED_FLOOR) + 4.0) / 4.0
    return (torch.maximum(log, log.amax(dim=(-2, -1), keepdim=True) - 8.0) + 4.0) / 4.0
