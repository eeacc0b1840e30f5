"""Augmentation is a pure function of sound, configuration and seed, and does as much as it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor
from torchaudio.functional import fftconvolve

from omni.audio.mel import log_mel
from omni.audio.wav import write_wav
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from train.data import augment
from train.data.augment import add_noise, augment_audio, augment_mel, coloured_noise, shape
from train.data.config import AugmentConfig

OFF = AugmentConfig()
MILD = AugmentConfig(speed=(0.9, 1.1), noise_snr_db=(10, 30), freq_masks=(1, 12), time_masks=(2, 20))
HARSH = AugmentConfig(
    speed=(0.5, 2.0), noise_snr_db=(-5, 5), noise_probability=0.7, echo_probability=0.8, band_probability=0.8,
    freq_masks=(3, 12), time_masks=(4, 50)
)  # fmt: skip


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def speech(samples: int = 8000) -> Tensor:
    return torch.randn(samples, generator=seeded(9)) * torch.linspace(0.01, 0.3, samples)


def varied(mel: Tensor, config: AugmentConfig, generator: Generator, **options: float | None) -> Tensor:
    return augment_mel(mel, config, generator, **options)[0]


def mel(frames: int = 200) -> Tensor:
    return torch.randn(80, frames, generator=seeded(8))


WARPED = AugmentConfig(
    warp_speed=(0.8, 1.2), warp_bands=(0.9, 1.1), feature_noise=(-6, -1), feature_gain_db=(-16, 8), time_masks=(1, 20)
)


@pytest.mark.parametrize("config", [MILD, HARSH, WARPED], ids=["mild", "harsh", "warped"])
def test_same_seed_same_result_other_seed_another(config: AugmentConfig) -> None:
    for function, given in ((augment_audio, speech()), (varied, mel())):
        if config is WARPED and function is augment_audio:
            continue
        before = given.clone()
        for seed in range(5):
            first, second = function(given, config, seeded(seed)), function(given, config, seeded(seed))
            assert torch.equal(first, second)
            other = function(given, config, seeded(seed + 100))
            assert first.shape != other.shape or not torch.equal(first, other)
        assert torch.equal(given, before)  # nothing is changed in place


def test_off_changes_nothing_and_draws_nothing() -> None:
    generator = seeded(0)
    state = generator.get_state()
    assert torch.equal(augment_audio(speech(), OFF, generator), speech())
    assert torch.equal(varied(mel(), OFF, generator), mel())
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("factor", [0.8, 0.93, 1.0, 1.17, 2.0])
def test_speed_changes_length_and_pitch(factor: float) -> None:
    hertz, seconds = 400.0, 1.0
    tone = torch.sin(2 * torch.pi * hertz * torch.arange(int(16000 * seconds)) / 16000)
    fast = augment_audio(tone, replace(OFF, speed=(factor, factor)), seeded(0))
    assert abs(len(fast) - len(tone) / factor) <= 1
    spectrum = torch.fft.rfft(fast).abs()
    assert float(spectrum.argmax()) * 16000 / len(fast) == pytest.approx(hertz * factor, abs=2)


@pytest.mark.parametrize("snr_db", [-5.0, 0.0, 20.0])
@pytest.mark.parametrize("colour", [0.0, 1.0, 2.0])
def test_noise_is_as_loud_as_asked(snr_db: float, colour: float) -> None:
    clean = speech()
    added = add_noise(clean, coloured_noise(len(clean), colour, seeded(1)), snr_db) - clean
    measured = 10 * torch.log10(clean.square().mean() / added.square().mean())
    assert float(measured) == pytest.approx(snr_db, abs=0.05)
    config = AugmentConfig(noise_snr_db=(snr_db, snr_db))
    added = augment_audio(clean, config, seeded(2)) - clean
    measured = 10 * torch.log10(clean.square().mean() / added.square().mean())
    assert float(measured) == pytest.approx(snr_db, abs=0.05)


@pytest.mark.parametrize("colour", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("samples", [60000, 65536])
def test_noise_has_its_colour(colour: float, samples: int) -> None:
    noise = coloured_noise(samples, colour, seeded(3))
    assert noise.shape == (samples,)
    if colour <= 1:  # above, a few slow swings hold most of the power
        assert float(noise.square().mean()) == pytest.approx(1.0, rel=0.2)
    power = torch.fft.rfft(noise * torch.hann_window(samples)).abs().square()
    low, high = power[200:400].mean(), power[6400:12800].mean()  # five octaves apart
    assert float(torch.log2(low / high)) / 5 == pytest.approx(colour, abs=0.1)


def test_a_room_has_its_echo_and_a_telephone_its_band() -> None:
    click = torch.eye(1, 16000)[0]
    for seed in range(5):
        echo = augment_audio(click, replace(OFF, echo_probability=1.0), seeded(seed)) - click
        fall = 10 * torch.log10(echo.square().flip(0).cumsum(0).flip(0))  # its slope is that of the decay (Schroeder 1965)
        assert -18 <= float(fall[0]) <= -3 and 1760 < 2 * int(((fall <= fall[0] - 5) & (fall > fall[0] - 35)).sum()) < 8800
    config = replace(OFF, noise_snr_db=(5.0, 5.0), band_probability=1.0)
    power = torch.fft.rfft(augment_audio(speech(16000), config, seeded(3))).abs().square()
    assert float(power[3600:].sum() + power[:200].sum()) < 1e-4 * float(power.sum())
    assert float(power[300:3400].sum()) > 0.9 * float(power.sum())


@pytest.mark.parametrize("config", [MILD, HARSH])
def test_silence_stays_finite(config: AugmentConfig) -> None:
    out = augment_audio(torch.zeros(4000), config, seeded(0))
    assert torch.equal(out, torch.zeros_like(out))


def test_noise_has_its_probability() -> None:
    clean = speech(2000)
    noisy = replace(OFF, noise_snr_db=(10.0, 10.0), noise_probability=0.3)
    hits = sum(not torch.equal(augment_audio(clean, noisy, seeded(seed)), clean) for seed in range(400))
    assert 80 < hits < 160


def test_noise_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "RECORDED", 1.0)
    (tmp_path / "deep").mkdir()
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(1600) / 16000)
    write_wav(tmp_path / "deep" / "hum.wav", tone * 0.5, 16000)
    config = AugmentConfig(noise_snr_db=(0, 0), noise_folder=str(tmp_path))
    clean = speech(8000)
    added = augment_audio(clean, config, seeded(4)) - clean  # the file is shorter: it is repeated
    spectrum = torch.fft.rfft(added).abs()
    assert int(spectrum.argmax()) == 500 and float(added.std()) == pytest.approx(float(clean.std()), rel=0.05)


@pytest.mark.parametrize("speed", [0.8, 1.0, 1.25])
def test_features_warped_in_time_are_those_of_faster_sound(speed: float) -> None:
    sweep = torch.sin(2 * torch.pi * 300 * (torch.arange(32000) / 16000) ** 2)
    config = replace(OFF, warp_speed=(speed, speed))
    warped = varied(log_mel(sweep), config, seeded(0))
    assert warped.shape == (80, int(200 / speed))
    # The sweep's rising band is reached `speed` times as early.
    band = log_mel(sweep)[:, 150].argmax()
    assert abs(int(warped[:, int(150 / speed)].argmax()) - int(band)) <= 1
    if speed == 1.0:
        torch.testing.assert_close(warped, log_mel(sweep), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gain_db", [-20.0, 6.0])
def test_gain_of_features_is_gain_of_sound(gain_db: float) -> None:
    sound = speech()
    louder = varied(log_mel(sound), replace(OFF, feature_gain_db=(gain_db, gain_db)), seeded(0))
    torch.testing.assert_close(louder, log_mel(sound * 10 ** (gain_db / 20)), rtol=1e-4, atol=1e-4)


def test_features_with_a_fixed_floor_keep_it_through_noise_and_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "NOISY", 1.0)
    config = WhisperConfig(mode="chunked")
    floor = config.feature_floor
    assert floor is not None
    sound = torch.cat([torch.zeros(8000), torch.randn(8000, generator=seeded(3)) * 0.01])
    features = config.features(sound)
    for gain_db in (-30.0, 6.0):  # the sound's own features are those of the sound made louder, but where the floor hides it
        louder = varied(features, replace(OFF, feature_gain_db=(gain_db, gain_db)), seeded(0), floor=floor)
        wanted = config.features(sound * 10 ** (gain_db / 20))
        torch.testing.assert_close(louder[:, 52:], wanted[:, 52:], rtol=0, atol=1e-4)
        assert louder[:, :48].eq(floor).all() and wanted[:, :48].eq(floor).all()
    noisy = varied(features, replace(OFF, feature_noise=(-20, -20)), seeded(0), floor=floor)
    assert noisy.min() == floor and noisy.max() < features.max() + 0.1
    loud = torch.cat([features, features + 1.5], dim=1)  # without a floor of its own, it follows from the loudest
    assert varied(loud, replace(OFF, feature_noise=(-20, -20)), seeded(0)).min() > floor


def test_noise_of_features_has_its_power(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment, "NOISY", 1.0)
    silence = log_mel(torch.zeros(32000), floor="fixed")
    for level in (-2.0, 0.0):
        config = replace(OFF, feature_noise=(level, level))
        middle = varied(silence, config, seeded(0))[39:41]  # where the noise has its level, whatever its tilt
        assert float((10 ** (4 * middle - 4)).mean()) == pytest.approx(10**level, rel=0.2)


def test_the_echo_of_features_is_that_of_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against noise that falls exponentially, convolved with the sound: a diffuse room's response."""
    frames, decibels = 40.0, -6.0
    sound = torch.zeros(16000)
    sound[4000:4400] = torch.randn(400, generator=seeded(0))
    fall = 10 ** (-3.0 * torch.arange(12000) / (frames * 160))  # of the amplitude
    powers = []
    for seed in range(40):
        room = torch.randn(12000, generator=seeded(seed)) * fall
        room *= 10 ** (decibels / 20) / float(room.square().sum().sqrt())
        heard = sound + fftconvolve(sound, room)[:16000]
        powers.append(10 ** (4 * log_mel(heard, floor="fixed") - 4))
    monkeypatch.setattr(augment, "ECHO_DB", (decibels, decibels))
    config = replace(OFF, feature_echo=(frames, frames), feature_echo_probability=1.0)
    ours = 10 ** (4 * varied(log_mel(sound, floor="fixed"), config, seeded(0)) - 4)
    theirs = torch.stack(powers).mean(0)
    for part in (slice(0, 24), slice(24, 31), slice(31, 45), slice(45, 65)):
        assert float(ours[:, part].sum()) == pytest.approx(float(theirs[:, part].sum()), rel=0.25, abs=1e-4)


def test_the_range_of_features_ends_at_a_floor() -> None:
    given = mel()
    out = varied(given, replace(OFF, feature_range=(1.0, 1.0)), seeded(0))
    torch.testing.assert_close(out, given.clamp_min(float(given.max()) - 0.25))


@pytest.mark.parametrize("frames", [None, 120])
def test_masks_are_runs_of_the_mean_within_the_sound(frames: int | None) -> None:
    config = replace(OFF, freq_masks=(2, 10), time_masks=(2, 30))
    given = mel()
    sound = given[:, :frames]
    widths = set()
    for seed in range(60):
        out = varied(given, config, seeded(seed), frames=frames)
        assert out.shape == given.shape
        assert torch.equal(out[:, sound.shape[1] :], given[:, sound.shape[1] :])
        changed = out[:, : sound.shape[1]] != sound
        assert torch.equal(out[:, : sound.shape[1]][changed], sound.mean().expand(int(changed.sum())))
        bands, times = changed.all(dim=1), changed.all(dim=0)
        assert torch.equal(changed, bands[:, None] | times[None, :])
        assert int(bands.sum()) <= 20 and int(times.sum()) <= 2 * min(30, int(0.2 * sound.shape[1]))
        widths.add(int(times.sum()))
    assert len(widths) > 5


def test_the_shape_of_features_is_a_smooth_filter_of_the_sound() -> None:
    """The same for every frame, zero in the mean, as strong as asked; a filter of the sound, seen band by band."""
    before = log_mel(speech())
    changes = []
    for seed in range(200):
        after = shape(before, 6.0, seeded(seed))
        change = (after - before)[:, :1]
        torch.testing.assert_close(after, before + change)
        assert float(change.diff(dim=0).abs().max()) < 0.1 and abs(float(change.mean())) < 1e-5
        changes.append(change * 40)
    assert float(torch.cat(changes, 1).square().mean().sqrt()) == pytest.approx(6.0, rel=0.1)
    config = replace(OFF, feature_shape_db=8.0)
    assert not torch.equal(varied(before, config, seeded(0)), before)
    assert torch.equal(varied(before, config, seeded(0), frames=20), before)
    with pytest.raises(UserError, match="feature_shape_db is -1"):
        AugmentConfig(feature_shape_db=-1)
