"""The encoder hears exactly what Whisper's modules hear on each clip alone, whatever the company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import whisper
from torch import Tensor
from whisper.model import AudioEncoder

from omni.encoder.base import collate
from omni.encoder.whisper import WhisperEncoder
from omni.encoder.whisper_config import ENCODER_PRESETS, WhisperConfig
from omni.errors import UserError
from tests.close import assert_near

SMALL = WhisperConfig(width=32, heads=2, layers=2, window_seconds=3.0)
WIDE = WhisperConfig(n_mels=128, width=48, heads=4, layers=3, window_seconds=2.0, mel_floor="fixed")
COARSE = WhisperConfig(width=32, heads=4, layers=2, window_seconds=4.0, hop=320)
CONFIGS = pytest.mark.parametrize("config", [SMALL, WIDE, COARSE], ids=["small", "wide", "coarse"])
# Several of one length, one of a single frame, odd and even numbers of feature frames, a full window.
SAMPLES = (16000, 50, 5000, 24123, 16000, 32000, 640, 480)


def clips(samples: tuple[int, ...] = SAMPLES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, generator=generator) * 0.1 for count in samples]


def whisper_of(encoder: WhisperEncoder) -> AudioEncoder:
    """The package's own encoder with the same weights, loaded by name."""
    c = encoder.config
    theirs = AudioEncoder(c.n_mels, c.positions, c.width, c.heads, c.layers)
    theirs.load_state_dict(encoder.whisper.state_dict())
    return theirs


def alone(theirs: AudioEncoder, mel: Tensor) -> Tensor:
    """Whisper's modules on one clip `[M, F]`, the positions cut to it: `[T, D]`."""
    x = F.gelu(theirs.conv1(mel[None]))
    x = F.gelu(theirs.conv2(x)).transpose(1, 2)
    x = x + theirs.positional_embedding[: x.shape[1]]
    for block in theirs.blocks:
        x = block(x)
    return theirs.ln_post(x)[0]


def run(encoder: WhisperEncoder, sounds: list[Tensor]) -> Tensor:
    mels, lengths = collate([encoder.config.features(clip) for clip in sounds])
    return encoder(mels, lengths, [encoder.config.frames(len(clip)) for clip in sounds])


@CONFIGS
@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 100.0])
def test_variable_equals_whisper_on_each_clip(config: WhisperConfig, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # The grouping of an accelerator (masked groups) must give what the grouping of a CPU gives.
    monkeypatch.setattr("omni.encoder.whisper.EQUAL_LENGTHS", ratio)
    encoder = WhisperEncoder(config)
    theirs = whisper_of(encoder)
    wanted = torch.cat([alone(theirs, encoder.config.features(clip)) for clip in clips()])
    assert_near(run(encoder, clips()), wanted)


@CONFIGS
def test_gradients_equal_those_of_whisper(config: WhisperConfig) -> None:
    encoder = WhisperEncoder(config)
    theirs = whisper_of(encoder)
    torch.cat([alone(theirs, encoder.config.features(clip)) for clip in clips()]).sin().sum().backward()
    run(encoder, clips()).sin().sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in encoder.whisper.named_parameters():
        assert parameter.grad is not None, name
        assert_near(parameter.grad, wanted[name].grad, what=name)


@CONFIGS
def test_company_order_and_padding_change_nothing(config: WhisperConfig) -> None:
    encoder = WhisperEncoder(config)
    sounds = clips()
    solo = [run(encoder, [clip]) for clip in sounds]
    order = torch.randperm(len(sounds), generator=torch.Generator().manual_seed(0)).tolist()
    assert_near(run(encoder, [sounds[i] for i in order]), torch.cat([solo[i] for i in order]))

    mels, lengths = collate([encoder.config.features(clip) for clip in sounds])
    beyond = torch.arange(mels.shape[2]) >= torch.tensor(lengths)[:, None]
    dirty = F.pad(mels.masked_fill(beyond[:, None], float("nan")), (0, 5), value=float("nan"))
    frames = [encoder.config.frames(len(clip)) for clip in sounds]
    assert_near(encoder(dirty, lengths, frames), torch.cat(solo))


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])
def test_padded_equals_whisper_on_the_window(config: WhisperConfig) -> None:
    encoder = WhisperEncoder(replace(config, mode="padded"))
    theirs = whisper_of(encoder)
    sounds = clips()
    wanted = []
    for clip in sounds:
        window = whisper.pad_or_trim(clip, config.max_samples)
        mel = encoder.config.features(clip)
        assert mel.shape == (config.n_mels, 2 * config.positions)
        if config.mel_floor == "clip":
            torch.testing.assert_close(mel, whisper.log_mel_spectrogram(window, config.n_mels), rtol=1e-6, atol=1e-6)
        wanted.append(theirs(mel[None])[0, : min(len(clip) // 320 + 1, config.positions)])
    assert_near(run(encoder, sounds), torch.cat(wanted))


def test_padded_frames_follow_the_rule_of_the_released_checkpoint() -> None:
    config = WhisperConfig(mode="padded")
    assert config.frames(32000) == 101
    for samples in (1, 319, 320, 31999, 64320, 256960, 479999, 480000):
        duration_ms = (samples / 16000) * 1000
        assert config.frames(samples) == min(int(duration_ms / 20) + 1, 1500)


def heard(encoder: WhisperEncoder, sound: torch.Tensor) -> torch.Tensor:
    """Frames of a sound of any length that the configuration allows, its windows in one batch."""
    return run(encoder, encoder.config.split(sound))


def test_the_padded_window_is_for_released_checkpoints() -> None:
    with pytest.raises(UserError, match="hop=320"):
        replace(COARSE, mode="padded")


@pytest.mark.parametrize("mode", ["variable", "padded"])
def test_long_sound_is_refused_or_split_and_never_cut(mode: Any) -> None:
    refusing = replace(SMALL, mode=mode)
    sound = torch.randn(SMALL.max_samples * 2 + 5000)
    for call in (lambda: refusing.split(sound), lambda: refusing.features(sound), lambda: refusing.frames(len(sound))):
        with pytest.raises(UserError, match=r"6\.3 s .* 3 s at once: cut it, or set encoder.long_audio=split"):
            call()
    splitting = replace(refusing, long_audio="split")
    with pytest.raises(UserError, match="split"):
        splitting.features(sound)
    pieces = splitting.split(sound)
    assert torch.equal(torch.cat(pieces), sound) and max(map(len, pieces)) == SMALL.max_samples
    encoder = WhisperEncoder(splitting)
    assert_near(heard(encoder, sound), torch.cat([heard(encoder, piece) for piece in pieces]))
    assert splitting.frames(len(sound)) == sum(splitting.frames(len(piece)) for piece in pieces)


@CONFIGS
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_checkpointing_changes_no_gradient(config: WhisperConfig, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni.encoder.whisper.EQUAL_LENGTHS", ratio)
    encoder = WhisperEncoder(config)
    gradients = []
    calls = []
    for block in encoder.whisper.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing in (False, True):
        encoder.checkpointing = checkpointing
        encoder.zero_grad()
        calls.clear()
        run(encoder, clips()).sin().sum().backward()
        assert len(calls) == config.layers * (2 if checkpointing else 1)
        gradients.append([p.grad.clone() for p in encoder.parameters() if p.grad is not None])
    plain, recomputed = gradients
    assert len(plain) == len(recomputed) == len(list(encoder.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@CONFIGS
def test_checkpointed_blocks_learn_behind_a_frozen_stem(config: WhisperConfig) -> None:
    # Reentrant checkpointing gives no gradient, and no error, where the input of a block needs none.
    encoder = WhisperEncoder(config)
    encoder.whisper.conv1.requires_grad_(False)
    encoder.whisper.conv2.requires_grad_(False)
    encoder.checkpointing = True
    run(encoder, clips()).sin().sum().backward()
    for name, parameter in encoder.whisper.blocks.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["variable", "padded"])
def test_a_step_without_speech_reaches_every_parameter(mode: Any, checkpointing: bool) -> None:
    encoder = WhisperEncoder(replace(SMALL, mode=mode))
    encoder.checkpointing = checkpointing
    out = encoder(torch.zeros(0, SMALL.n_mels, 0), [], [])
    assert out.shape == (0, SMALL.width)
    out.sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@CONFIGS
def test_reduced_precision(config: WhisperConfig) -> None:
    encoder = WhisperEncoder(config)
    exact = run(encoder, clips())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(encoder, clips())
    assert mixed.dtype == torch.float32  # the residual stream keeps the weights' precision
    assert_near(mixed, exact, relative=0.02)
    mixed.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in encoder.parameters())
    half = encoder.to(torch.bfloat16)
    low = run(half, clips())
    assert low.dtype == torch.bfloat16
    assert_near(low.float(), exact, relative=0.04)


def test_state_is_whispers_and_nothing_else() -> None:
    encoder = WhisperEncoder(SMALL)
    theirs = AudioEncoder(SMALL.n_mels, SMALL.positions, SMALL.width, SMALL.heads, SMALL.layers)
    assert list(encoder.state_dict()) == [f"whisper.{name}" for name in theirs.state_dict()]
    encoder.whisper.load_state_dict(theirs.state_dict())
    mel = torch.randn(1, SMALL.n_mels, 2 * SMALL.positions)
    assert_near(encoder(mel, [2 * SMALL.positions], [SMALL.positions]), theirs(mel)[0])


@pytest.mark.parametrize("name", ["tiny", "base", "small", "medium", "large", "large-v3", "large-v3-turbo"])
def test_presets_have_the_published_sizes(name: str) -> None:
    # Parameters of the released encoders, convolutions and all, without the position table (a buffer).
    millions = {"tiny": 7.6, "base": 19.8, "small": 87.0, "medium": 305.7, "large": 635.0}
    with torch.device("meta"):
        encoder = WhisperEncoder(ENCODER_PRESETS[name])
    count = sum(p.numel() for p in encoder.parameters()) / 1e6
    assert count == pytest.approx(millions.get(name, 635.2), abs=0.2)
    assert encoder.whisper.positional_embedding.shape[0] == 1500


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("span", "blur"), [(8.0, 0.0), (1.5, 0.0), (8.0, 1.25)])
@CONFIGS
def test_normalised_features_are_each_clips_own(config: WhisperConfig, span: float, blur: float) -> None:
    """Against Whisper's modules on features that were normalised one clip at a time; what lies behind a clip is not read."""
    torch.manual_seed(0)
    encoder, sounds = WhisperEncoder(replace(config, normalize="clip", mel_range=span, mel_blur=blur)), clips()
    theirs = whisper_of(encoder)
    wanted = []
    for sound in sounds:
        mel = encoder.config.features(sound).double()
        mel = mel.clamp_min(mel.max() - span / 4)
        mel = mel - mel.mean(1, keepdim=True)
        mel = mel / mel.square().mean().sqrt().clamp_min(1e-3)
        if blur:
            near = torch.exp(-((torch.arange(-12, 13).double() / blur) ** 2) / 2)[None, None, :, None]
            mel, whole = (F.conv2d(x[None, None], near, padding=(12, 0))[0, 0] for x in (mel, torch.ones_like(mel)))
            mel = mel / whole
        wanted.append(alone(theirs, mel.float()))
    mels, lengths = collate([encoder.config.features(sound) for sound in sounds])
    for mel, length in zip(mels, lengths, strict=True):
        mel[:, length:] = float("nan")
    assert_near(encoder(mels, lengths, [encoder.config.frames(len(sound)) for sound in sounds]), torch.cat(wanted), 1e-5)
