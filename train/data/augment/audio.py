"""Augmentation of training sound: speed, noise, gain, then masks over the features.

Two functions, both pure: the same input, configuration and generator state give the same output, bit for bit, and nothing is
changed in place. Augmentations that are switched off draw no random numbers.

    generator = torch.Generator().manual_seed(seed)
    audio = augment_audio(audio, config, generator)   # its length may change: count frames afterwards
    mel = augment_mel(features(audio, ...), config, generator)
    mel, voice = augment_turn(mel, voice, config, generator, rate)  # the same, with pauses, and where there is speech

S samples, M mel bands, F feature frames.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from omni.audio.io import SAMPLE_RATE, read_audio
from omni.audio.resample import resample
from omni.audio.sniff import SUFFIXES
from omni.errors import UserError
from train.data.augment.config import AugmentConfig, Range
from train.data.augment.features import add_echo, add_feature_noise, shape, warp
from train.data.augment.pauses import gaps, insert, speech


def augment_audio(audio: Tensor, config: AugmentConfig, generator: Generator) -> Tensor:
    """Vary speed, noise and gain of `[S]` float32 at 16 kHz; returns `[S']`, S' about S / speed.

    UserError: the noise folder is missing or holds no sound, or one of its files cannot be read.
    """
    if config.speed is not None:
        audio = change_speed(audio, _uniform(config.speed, generator))
    if config.noise_snr_db is not None and _uniform((0.0, 1.0), generator) < config.noise_probability:
        noise = _noise(audio.shape[-1], config, generator)
        audio = add_noise(audio, noise, _uniform(config.noise_snr_db, generator))
    if config.gain_db is not None:
        audio = audio * 10.0 ** (_uniform(config.gain_db, generator) / 20.0)
    return audio


def change_speed(audio: Tensor, factor: float) -> Tensor:
    """Play `[S]` `factor` times as fast, pitch included, by resampling; rounded to 0.01, so filters are reused."""
    return resample(audio, round(100 * factor), 100)


def add_noise(audio: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    """Add `noise` `[S]` to `audio` `[S]`, its power `snr_db` below the power of the whole clip.

    A silent clip has no power to compare with and stays silent; silent noise adds nothing.
    """
    signal, floor = audio.square().mean().sqrt(), noise.square().mean().sqrt()
    return audio + noise * (signal / floor.clamp(min=1e-12) * 10.0 ** (-snr_db / 20.0))


def coloured_noise(samples: int, colour: float, generator: Generator) -> Tensor:
    """Gaussian noise `[samples]` of about unit power, its spectrum falling as 1 / f**colour in power.

    Drawn as a spectrum with the exponent rounded to 0.05, at a length that transforms fast, then cut.
    """
    shape = _spectral_shape(_fast_length(samples), round(20 * colour))
    spectrum = torch.view_as_complex(torch.randn(shape.shape[0], 2, generator=generator))
    return torch.fft.irfft(spectrum * shape)[:samples]


def augment_mel(
    mel: Tensor, config: AugmentConfig, generator: Generator, *, frames: int | None = None, floor: float | None = None
) -> Tensor:
    """Vary features `[M, F]`, then mask runs of bands and of frames with the clip's mean: `[M, F']`.

    F' differs from F only under `warp_speed`. frames: number of frames with sound, where the features fill a padded window:
    time masks are drawn within them, and warp, shape, feature noise and feature gain, which would change the silence after
    the sound too, are left out. floor: the least value of a feature, where it does not follow from the clip. Returned as it is
    where nothing is switched on.
    Source of the masks: Park et al. 2019, "SpecAugment", frequency and time masking.
    """
    if frames is None:
        mel = _vary(_Sound(mel), config, generator, floor).mel
    return _mask(mel, config, generator, frames)


def augment_turn(
    mel: Tensor, voice: Tensor | None, config: AugmentConfig, generator: Generator, rate: float, floor: float
) -> tuple[Tensor, Tensor | None]:
    """As `augment_mel` of features `[M, F]` that have only sound, with the pauses of the configuration besides.

    Pauses are at the floor, before echo and noise are added, which they get like the rest. Time masks leave them alone: where a
    mask hides them, nothing shows that nobody speaks.

    Args:
        voice: frames with speech [F] bool, None where nobody asks for them.
        rate: feature frames of a second.
        floor: the least value of a feature.

    Returns:
        features `[M, F']`, and frames with speech [F'].
    """
    sound = _vary(_Sound(mel, voice), config, generator, floor, rate)
    return _mask(sound.mel, config, generator, None, sound.silent), sound.voice


def _mask(
    mel: Tensor, config: AugmentConfig, generator: Generator, frames: int | None = None, silent: Tensor | None = None
) -> Tensor:
    """Mask runs of bands and of frames; `silent` frames [F] bool keep theirs, and count for no mean."""
    bands, length = mel.shape[0], mel.shape[1] if frames is None else min(frames, mel.shape[1])
    if not config.freq_masks and not config.time_masks:
        return mel
    out = mel.clone()
    mean = mel[:, :length].mean() if silent is None else mel[:, ~silent].mean()
    places = torch.rand(config.freq_masks + config.time_masks, 2, generator=generator, dtype=torch.float64).tolist()
    for place in places[: config.freq_masks]:
        start, width = _run(bands, config.freq_width, place)
        out[start : start + width, :length] = mean
    for place in places[config.freq_masks :]:
        start, width = _run(length, min(config.time_width, int(config.time_fraction * length)), place)
        if silent is None:
            out[:, start : start + width] = mean
        else:
            out[:, start : start + width][:, ~silent[start : start + width]] = mean
    return out


# ---------------------------------------------------------------------------------------------------- drawing


class _Sound(NamedTuple):
    """Features `[M, F]`, frames with speech and frames that were put in `[F]` bool; None where nobody asks, or none were."""

    mel: Tensor
    voice: Tensor | None = None
    silent: Tensor | None = None


def _vary(sound: _Sound, config: AugmentConfig, generator: Generator, floor: float | None, rate: float | None = None) -> _Sound:
    """Vary speaker, pauses, room, noise and loudness in features `[M, F]`, without their sound: `[M, F']`.

    rate: feature frames of a second; None for no pauses.
    """
    mel, voice, silent = sound
    pausing = (
        config.pauses is not None
        and rate is not None
        and (config.pause_probability > 0 or config.pause_before[1] + config.pause_after[1] > 0)
    )
    varied = (config.warp_speed, config.warp_bands, config.feature_shape_db, config.feature_noise, config.feature_gain_db)
    rooms = (config.feature_echo, config.feature_range)
    if not any(varied + rooms) and not pausing:
        return sound
    # All numbers are drawn at once, at a seventh of the cost of single draws.
    places = torch.rand(11 if any(rooms) else 7, generator=generator, dtype=torch.float64).tolist()
    if config.warp_speed is not None or config.warp_bands is not None:
        speed = _between(config.warp_speed, places[0]) if config.warp_speed else 1.0
        bands = _between(config.warp_bands, places[1]) if config.warp_bands else 1.0
        mel = warp(mel, speed, bands)
        if voice is not None:  # each frame has the speech of the one that it is made of
            voice = voice[(torch.arange(mel.shape[1]) * speed).long().clamp_max(len(voice) - 1)]
    if config.feature_shape_db:
        mel = shape(mel, places[2] * config.feature_shape_db, generator)
    if pausing:
        assert rate is not None and floor is not None
        mel, voice, silent = _with_pauses(mel, voice, config, generator, rate, floor)
    if config.feature_echo is not None and places[7] < config.feature_echo_probability:
        mel = add_echo(mel, _between(config.feature_echo, places[8]), _between(config.feature_echo_db, places[9]))
    if config.feature_noise is not None and places[3] < config.feature_noise_probability:
        mel = add_feature_noise(mel, _between(config.feature_noise, places[4]), 2 * places[5] - 1, generator, floor)
    if config.feature_range is not None:
        mel = mel.clamp_min(float(mel.max()) - _between(config.feature_range, places[10]) / 4)
    if config.feature_gain_db is not None:
        louder = mel + _between(config.feature_gain_db, places[6]) / 40.0  # a feature is log10 of power, over 4
        mel = louder if floor is None else torch.where(mel > floor, louder, floor)
    return _Sound(mel if floor is None else mel.clamp_min(floor), voice, silent)


def _with_pauses(
    mel: Tensor, voice: Tensor | None, config: AugmentConfig, generator: Generator, rate: float, floor: float
) -> _Sound:
    """Put silence between words, and around the sound."""
    assert config.pauses is not None
    draws = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
    length = mel.shape[1]
    before, after = _between(config.pause_before, draws[0]), _between(config.pause_after, draws[1])
    runs = [(0, round(rate * before)), (length, round(rate * after))]
    if draws[2] < config.pause_probability:
        places = gaps(mel, speech(mel) if voice is None else voice)
        for place, seconds in ((draws[4], draws[5]), (draws[6], draws[7]))[: 1 if draws[3] < 0.5 else 2]:
            if places:
                at = places.pop(int(place * len(places)))
                runs.append((at, round(rate * _between(config.pauses, seconds))))
    runs = sorted((at, frames) for at, frames in runs if frames)
    if not runs:
        return _Sound(mel, voice)
    silent = insert(torch.zeros(length, dtype=torch.bool), runs, True)
    return _Sound(insert(mel, runs, floor), None if voice is None else insert(voice, runs, False), silent)


def _uniform(bounds: Range, generator: Generator) -> float:
    return _between(bounds, float(torch.rand((), generator=generator, dtype=torch.float64)))


def _between(bounds: Range, place: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * place


def _integer(high: int, generator: Generator) -> int:
    """Uniform in 0 .. high, both included."""
    return int(torch.randint(high + 1, (), generator=generator))


def _run(length: int, widest: int, place: tuple[float, float]) -> tuple[int, int]:
    """Start and width of a run of 0 to `widest` places within `length`, from two numbers in [0, 1)."""
    width = int(place[0] * (min(widest, length) + 1))
    return int(place[1] * (length - width + 1)), width


def _noise(samples: int, config: AugmentConfig, generator: Generator) -> Tensor:
    if config.noise_folder is not None and _uniform((0.0, 1.0), generator) < config.noise_file_probability:
        files = noise_files(config.noise_folder)
        noise = _noise_file(files[_integer(len(files) - 1, generator)])
        start = _integer(noise.shape[0] - 1, generator)
        repeats = -(-(start + samples) // noise.shape[0])
        return noise.repeat(repeats)[start : start + samples]
    return coloured_noise(samples, _uniform(config.noise_colour, generator), generator)


@lru_cache(maxsize=8)
def noise_files(folder: str) -> tuple[str, ...]:
    """Sound files below a folder, in an order that does not depend on the file system."""
    if not os.path.isdir(folder):
        raise UserError(f"augment.noise_folder={folder!r} is not a folder: check the path")
    files = tuple(sorted(str(path) for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES))
    if not files:
        raise UserError(f"augment.noise_folder={folder!r} holds no {', '.join(SUFFIXES[:4])} file")
    return files


@lru_cache(maxsize=64)
def _noise_file(path: str) -> Tensor:
    return read_audio(path, SAMPLE_RATE)


@lru_cache(maxsize=256)
def _spectral_shape(length: int, twentieths: int) -> Tensor:
    """Amplitude `[length / 2 + 1]` of 1 / f**(colour / 2), without a constant part, for noise of unit power."""
    shape = torch.arange(length // 2 + 1, dtype=torch.float32)
    shape[1:] = shape[1:] ** (-twentieths / 40.0)
    # Real and imaginary parts are drawn with unit variance, so white noise needs sqrt(length / 2).
    return shape * ((length / 2) ** 0.5 / shape[1:].square().mean().sqrt())


def _fast_length(samples: int) -> int:
    """Smallest 4, 5, 6 or 7 times a power of two that is at least `samples` (and even)."""
    unit = 1 << max(max(samples - 1, 1).bit_length() - 3, 1)
    return max(4 * unit, -(-samples // unit) * unit)
