"""Features are Whisper's own; with a fixed floor they can be made while the sound is still coming in."""

from __future__ import annotations

import pytest
import torch
import whisper

from omni.audio.mel import FIXED_FLOOR, log_mel, mel_frames


def sound(samples: int, seed: int = 0) -> torch.Tensor:
    """Noise that swells and fades, so that the floor matters."""
    generator = torch.Generator().manual_seed(seed)
    level = 10 ** (-5 * torch.rand(samples // 800 + 1, generator=generator))
    return torch.randn(samples, generator=generator) * level.repeat_interleave(800)[:samples]


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("samples", [201, 320, 16000, 31999, 48123])
def test_equals_whisper(samples: int, n_mels: int) -> None:
    audio = sound(samples)
    wanted = whisper.log_mel_spectrogram(audio, n_mels)
    ours = log_mel(audio, n_mels)
    assert ours.shape == wanted.shape == (n_mels, mel_frames(samples))
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def test_equals_whisper_on_the_padded_window() -> None:
    audio = whisper.pad_or_trim(sound(20000))
    torch.testing.assert_close(log_mel(audio), whisper.log_mel_spectrogram(audio), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("floor", ["clip", "fixed"])
@pytest.mark.parametrize("hop", [160, 320])
def test_a_batch_equals_its_clips(floor: str, hop: int) -> None:
    clips = torch.stack([sound(9000), sound(9000, 1) * 0.01, torch.zeros(9000)])
    batch = log_mel(clips, floor=floor, hop=hop)  # type: ignore[arg-type]
    for clip, features in zip(clips, batch, strict=True):
        alone = log_mel(clip, floor=floor, hop=hop)  # type: ignore[arg-type]
        torch.testing.assert_close(features, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hop", [160, 320])
@pytest.mark.parametrize("cut", [1600, 7777, 12345])
def test_with_a_fixed_floor_the_end_does_not_reach_the_beginning(cut: int, hop: int) -> None:
    audio = torch.cat([sound(cut) * 0.001, sound(8000, 1)])
    whole, beginning = log_mel(audio, floor="fixed", hop=hop), log_mel(audio[:cut], floor="fixed", hop=hop)
    final = mel_frames(cut, hop) - 1  # the window of the last frame reaches over the cut
    torch.testing.assert_close(beginning[:, :final], whole[:, :final], rtol=1e-6, atol=1e-6)
    # Whisper's floor follows the loud end: the trap that "fixed" avoids.
    assert not torch.allclose(log_mel(audio[:cut], hop=hop)[:, :final], log_mel(audio, hop=hop)[:, :final], atol=1e-2)


def test_floors() -> None:
    audio = sound(16000)
    clip = log_mel(audio)
    assert clip.min() >= clip.max() - 2.0
    quiet = log_mel(torch.zeros(16000), floor="fixed")
    assert torch.equal(quiet, torch.full_like(quiet, (FIXED_FLOOR + 4) / 4))
    assert torch.isfinite(log_mel(torch.zeros(16000))).all()


@pytest.mark.parametrize("hop", [160, 200, 320])
@pytest.mark.parametrize("samples", [1, 100, 159, 160, 200, 201, 319, 320, 321, 480, 641])
def test_every_sound_has_a_frame(samples: int, hop: int) -> None:
    features = log_mel(sound(samples), hop=hop)
    assert features.shape == (80, mel_frames(samples, hop)) == (80, max(samples // hop, 1))
    assert torch.isfinite(features).all()


def test_mixed_precision_does_not_reach_the_features() -> None:
    audio = sound(8000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(log_mel(audio), log_mel(audio.double()))
        inside = log_mel(audio)
    assert inside.dtype == torch.float32 and torch.equal(inside, log_mel(audio))
