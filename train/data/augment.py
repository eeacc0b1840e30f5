"""Augmentation of training sound and of its log-mel features: speed, rooms, noise, telephones, gain, pauses, masks.

All of it is pure: the same input, configuration and generator state give the same output, bit for bit, and nothing is changed
in place. Augmentations that are switched off draw no random numbers.

    generator = torch.Generator().manual_seed(seed)
    audio = augment_audio(audio, config, generator)   # its length may change: count frames afterwards
    mel, voice = augment_mel(features(audio, ...), config, generator, voice=voice)

Features are Whisper's, x = (log10(power) + 4) / 4, from which power is recovered: noise is added as power, and Whisper's floor
is applied again.

S samples, M mel bands, F feature frames.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from math import log
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from omni.audio.decode import SUFFIXES
from omni.audio.io import SAMPLE_RATE, read_audio
from omni.audio.resample import resample
from omni.errors import UserError
from train.data.config import AugmentConfig, Range, SoundAugmentConfig

COLOUR: Range = (0.0, 1.0)
"""Generated noise falls with frequency as 1 / f**colour in power: 0 white, 1 pink."""
RECORDED, NOISY = 0.5, 0.5  # share of noise from files, where there are any; of clips whose features get noise
ECHO_DB: Range = (-18.0, -3.0)  # power of all of the echo relative to the sound itself
ECHO_SECONDS: Range = (0.12, 0.5)  # in which the echo of a sound falls by 60 dB
MASKED = 0.2  # largest share of a clip that a mask over time hides


def augment_audio(audio: Tensor, config: SoundAugmentConfig, generator: Generator) -> Tensor:
    """Vary speed, room, noise and band of `[S]` float32 at 16 kHz; returns `[S']`, S' about S / speed. UserError: the noise
    folder is missing or holds no sound, or one of its files cannot be read."""
    if config.speed is not None:
        audio = resample(audio, round(100 * _uniform(config.speed, generator)), 100)  # steps of 0.01, so filters are reused
    if config.echo_probability and _uniform((0.0, 1.0), generator) < config.echo_probability:
        audio = add_room(audio, _uniform(ECHO_SECONDS, generator), _uniform(ECHO_DB, generator), generator)
    if config.noise_snr_db is not None and _uniform((0.0, 1.0), generator) < config.noise_probability:
        samples = audio.shape[-1]
        if config.noise_folder is not None and _uniform((0.0, 1.0), generator) < RECORDED:
            files = noise_files(config.noise_folder)
            noise = _recording(files[int(torch.randint(len(files), (), generator=generator))])
            start = int(torch.randint(noise.shape[0], (), generator=generator))
            noise = noise.repeat(-(-(start + samples) // noise.shape[0]))[start : start + samples]
        else:
            noise = coloured_noise(samples, _uniform(COLOUR, generator), generator)
        audio = add_noise(audio, noise, _uniform(config.noise_snr_db, generator))
    if config.band_probability and _uniform((0.0, 1.0), generator) < config.band_probability:
        audio = telephone(audio)
    return audio


def add_room(audio: Tensor, seconds: float, decibels: float, generator: Generator) -> Tensor:
    """Add the echo of a diffuse room to `[S]`: noise that falls by 60 dB in `seconds` (Polack 1988), `decibels` the power of
    all of it relative to the sound's."""
    echo = torch.randn(round(seconds * SAMPLE_RATE), generator=generator)
    echo *= 10.0 ** (-3.0 * torch.arange(len(echo)) / len(echo))
    echo *= 10.0 ** (decibels / 20.0) / echo.norm()
    size = -(-(len(audio) + len(echo)) // 8192) * 8192  # which transforms fast
    return audio + torch.fft.irfft(torch.fft.rfft(audio, size) * torch.fft.rfft(echo, size), size)[: len(audio)]


def telephone(audio: Tensor) -> Tensor:
    """Keep the band of a telephone in `[S]`, 300 to 3,400 Hz, and nothing from 200 and 3,600 Hz on."""
    size = (len(audio) // 8192 + 1) * 8192
    hertz = torch.fft.rfftfreq(size, 1 / SAMPLE_RATE)
    band = ((hertz - 200) / 100).clamp(0, 1) * ((3600 - hertz) / 200).clamp(0, 1)
    return torch.fft.irfft(torch.fft.rfft(audio, size) * band, size)[: len(audio)]


def add_noise(audio: Tensor, noise: Tensor, snr_db: float) -> Tensor:
    """Add `noise` `[S]` to `audio` `[S]`, its power `snr_db` below the power of the whole clip. A silent clip has no power to
    compare with and stays silent; silent noise adds nothing."""
    signal, floor = audio.square().mean().sqrt(), noise.square().mean().sqrt()
    return audio + noise * (signal / floor.clamp(min=1e-12) * 10.0 ** (-snr_db / 20.0))


def coloured_noise(samples: int, colour: float, generator: Generator) -> Tensor:
    """Gaussian noise `[samples]` of about unit power, its spectrum falling as 1 / f**colour in power. Drawn as a spectrum with
    the exponent rounded to 0.05, at a length that transforms fast, then cut."""
    unit = 1 << max(max(samples - 1, 1).bit_length() - 3, 1)
    length = max(4 * unit, -(-samples // unit) * unit)  # 4, 5, 6 or 7 times a power of two
    shape = _spectral_shape(length, round(20 * colour))
    spectrum = torch.view_as_complex(torch.randn(shape.shape[0], 2, generator=generator))
    return torch.fft.irfft(spectrum * shape)[:samples]


def augment_mel(
    mel: Tensor,
    config: AugmentConfig,
    generator: Generator,
    *,
    voice: Tensor | None = None,
    frames: int | None = None,
    floor: float | None = None,
    rate: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Vary features `[M, F]`, then mask runs of bands and of frames with the clip's mean. Source of the masks: Park et al.
    2019, "SpecAugment", frequency and time masking.

    Pauses are at the floor, before echo and noise are added, which they get like the rest. Time masks leave them alone: where a
    mask hides them, nothing shows that nobody speaks. Returns features `[M, F']`, as they are where nothing is switched on, and
    frames with speech [F']; F' differs from F under `warp_speed` and `pauses`.

    Args:
        voice: frames with speech [F] bool, None where nobody asks for them.
        frames: number of frames with sound, where the features fill a padded window: time masks are drawn within them, and all
            else, which would change the silence after the sound too, is left out.
        floor: the least value of a feature, where it does not follow from the clip.
        rate: feature frames of a second; None for no pauses.
    """
    silent = None
    if frames is None:
        mel, voice, silent = _vary(mel, voice, config, generator, floor, rate)
    return _mask(mel, config, generator, frames, silent), voice


def _mask(
    mel: Tensor, config: AugmentConfig, generator: Generator, frames: int | None = None, silent: Tensor | None = None
) -> Tensor:
    """Mask runs of bands and of frames; `silent` frames [F] bool keep theirs, and count for no mean."""
    bands, length = mel.shape[0], mel.shape[1] if frames is None else min(frames, mel.shape[1])
    (bands_masked, widest), (times_masked, longest) = config.freq_masks, config.time_masks
    if not bands_masked and not times_masked:
        return mel
    out = mel.clone()
    mean = mel[:, :length].mean() if silent is None else mel[:, ~silent].mean()
    places = torch.rand(bands_masked + times_masked, 2, generator=generator, dtype=torch.float64).tolist()
    for draw in places[:bands_masked]:
        start, width = _run(bands, widest, draw)
        out[start : start + width, :length] = mean
    for draw in places[bands_masked:]:
        start, width = _run(length, min(longest, int(MASKED * length)), draw)
        if silent is None:
            out[:, start : start + width] = mean
        else:
            out[:, start : start + width][:, ~silent[start : start + width]] = mean
    return out


# ---------------------------------------------------------------------------------------------------- drawing


class _Features(NamedTuple):
    """Features `[M, F]`, frames with speech and frames that were put in `[F]` bool; None where nobody asks, or none were."""

    mel: Tensor
    voice: Tensor | None = None
    silent: Tensor | None = None


def _vary(
    mel: Tensor, voice: Tensor | None, config: AugmentConfig, generator: Generator, floor: float | None, rate: float | None
) -> _Features:
    """Vary speaker, pauses, room, noise and loudness in features `[M, F]`, without their sound: `[M, F']`."""
    silent = None
    pausing = (
        config.pauses is not None
        and rate is not None
        and (config.pause_probability > 0 or config.pause_before[1] + config.pause_after[1] > 0)
    )
    varied = (config.warp_speed, config.warp_bands, config.feature_shape_db, config.feature_noise, config.feature_gain_db)
    rooms = (config.feature_echo, config.feature_range)
    if not any(varied + rooms) and not pausing:
        return _Features(mel, voice)
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
        mel = add_echo(mel, _between(config.feature_echo, places[8]), _between(ECHO_DB, places[9]))
    if config.feature_noise is not None and places[3] < NOISY:
        mel = add_feature_noise(mel, _between(config.feature_noise, places[4]), 2 * places[5] - 1, generator, floor)
    if config.feature_range is not None:
        mel = mel.clamp_min(float(mel.max()) - _between(config.feature_range, places[10]) / 4)
    if config.feature_gain_db is not None:
        louder = mel + _between(config.feature_gain_db, places[6]) / 40.0  # a feature is log10 of power, over 4
        mel = louder if floor is None else torch.where(mel > floor, louder, floor)
    return _Features(mel if floor is None else mel.clamp_min(floor), voice, silent)


def _with_pauses(
    mel: Tensor, voice: Tensor | None, config: AugmentConfig, generator: Generator, rate: float, floor: float
) -> _Features:
    """Put silence between words, and around the sound."""
    assert config.pauses is not None
    draws = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
    length = mel.shape[1]
    before, after = _between(config.pause_before, draws[0]), _between(config.pause_after, draws[1])
    runs = [(0, round(rate * before)), (length, round(rate * after))]
    if draws[2] < config.pause_probability:
        places = gaps(mel, speech(mel) if voice is None else voice)
        for draw, seconds in ((draws[4], draws[5]), (draws[6], draws[7]))[: 1 if draws[3] < 0.5 else 2]:
            if places:
                at = places.pop(int(draw * len(places)))
                runs.append((at, round(rate * _between(config.pauses, seconds))))
    runs = sorted((at, frames) for at, frames in runs if frames)
    if not runs:
        return _Features(mel, voice)
    silent = insert(torch.zeros(length, dtype=torch.bool), runs, True)
    return _Features(insert(mel, runs, floor), None if voice is None else insert(voice, runs, False), silent)


def _uniform(bounds: Range, generator: Generator) -> float:
    return _between(bounds, float(torch.rand((), generator=generator, dtype=torch.float64)))


def _between(bounds: Range, share: float) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * share


def _run(length: int, widest: int, draws: tuple[float, float]) -> tuple[int, int]:
    """Start and width of a run of 0 to `widest` places within `length`, from two numbers in [0, 1)."""
    width = int(draws[0] * (min(widest, length) + 1))
    return int(draws[1] * (length - width + 1)), width


_recording = lru_cache(maxsize=64)(partial(read_audio, sample_rate=SAMPLE_RATE))


@lru_cache(maxsize=8)
def noise_files(folder: str) -> tuple[str, ...]:
    """Sound files below a folder, in an order that does not depend on the file system."""
    if not os.path.isdir(folder):
        raise UserError(f"augment.noise_folder={folder!r} is not a folder: check the path")
    files = tuple(sorted(str(path) for path in Path(folder).rglob("*") if path.suffix.lower() in SUFFIXES))
    if not files:
        raise UserError(f"augment.noise_folder={folder!r} holds no {', '.join(SUFFIXES[:4])} file")
    return files


@lru_cache(maxsize=256)
def _spectral_shape(length: int, twentieths: int) -> Tensor:
    """Amplitude `[length / 2 + 1]` of 1 / f**(colour / 2), without a constant part, for noise of unit power."""
    shape = torch.arange(length // 2 + 1, dtype=torch.float32)
    shape[1:] = shape[1:] ** (-twentieths / 40.0)
    # Real and imaginary parts are drawn with unit variance, so white noise needs sqrt(length / 2).
    return shape * ((length / 2) ** 0.5 / shape[1:].square().mean().sqrt())


_LN10 = log(10.0)


def warp(mel: Tensor, speed: float, bands: float) -> Tensor:
    """Play features [M, F] `speed` times as fast, and stretch them over the bands by `bands` as a shorter vocal tract would.
    Linear interpolation in both directions; [M, F'] with F' = F / speed. Source of the second: Jaitly and Hinton 2013, "Vocal
    Tract Length Perturbation", with a linear warp."""
    out = max(1, int(mel.shape[1] / speed))
    return torch.from_numpy(_stretched(_stretched(mel.numpy(), 1, speed, out), 0, bands, mel.shape[0]))


def _stretched(x: np.ndarray, axis: int, factor: float, size: int) -> np.ndarray:
    """Interpolate `size` values along an axis, `factor` apart; beyond the end, the last value is repeated. In NumPy, whose
    calls cost less than PyTorch's for arrays as small as these."""
    last = x.shape[axis] - 1
    position = np.minimum(np.arange(size, dtype=np.float32) * np.float32(factor), last)
    low = position.astype(np.intp)
    share = position - low
    out = x.take(np.minimum(low + 1, last), axis)
    below = x.take(low, axis)
    out -= below
    out *= share if axis else share[:, None]
    out += below
    return out


def shape(mel: Tensor, decibels: float, generator: Generator, curves: int = 5) -> Tensor:
    """Colour features [M, F] as another microphone or room would: a smooth gain over the bands, the same in every frame. The
    gain is a sum of `curves` cosines over the bands, of half a period and up, with normal weights that fall as one over their
    number; its standard deviation over bands and draws is about `decibels`."""
    bands = mel.shape[0]
    angle = (torch.arange(bands) + 0.5) * (torch.pi / bands)
    number = torch.arange(1, curves + 1)
    weights = torch.randn(curves, generator=generator) / number
    gain = weights @ torch.cos(number[:, None] * angle)
    scale = decibels / 40.0 / float((0.5 / number.double().square()).sum().sqrt())  # a feature is log10 of power, over 4
    return mel + (gain * scale)[:, None]


def add_echo(mel: Tensor, frames: float, decibels: float) -> Tensor:
    """Add an echo to features [M, F]: every frame's power is added to the following frames, decaying exponentially.

    Args:
        frames: frames in which the echo falls by 60 dB.
        decibels: power of the whole echo relative to the sound's, whatever its length.

    The exponential decay is that of a diffuse room (Polack 1988); phases are not kept, powers add.
    """
    x = mel.numpy()
    fall = 10.0 ** (-6.0 / frames)
    late = np.arange(x.shape[1], dtype=np.float32)
    late = late[None, :] - late[:, None] - 1  # [from, to]: frames since the first frame of the echo
    weights = np.where(late >= 0, np.float32(10 ** (decibels / 10) * (1 - fall)) * np.float32(fall) ** np.maximum(late, 0), 0)
    power = np.exp((x - 1) * np.float32(4 * _LN10))
    # By PyTorch, which data workers limit to one thread; NumPy would occupy all cores.
    power += (torch.from_numpy(power) @ torch.from_numpy(weights.astype(np.float32))).numpy()
    return torch.from_numpy(1 + np.log(power, out=power) * np.float32(0.25 / _LN10))


def add_feature_noise(mel: Tensor, level: float, tilt: float, generator: Generator, floor: float | None = None) -> Tensor:
    """Add noise to features [M, F] as power, exponentially distributed as that of Gaussian noise is.

    Args:
        level: log10 of the noise's mean power in the middle band (speech peaks near 1).
        tilt: how much log10 of the power rises from the middle band to the highest.
        floor: least value of a feature; None for Whisper's, which follows from the clip.
    """
    x = mel.numpy()
    draws = _exponential()
    if x.size > len(draws):
        noise = torch.empty(x.shape).exponential_(generator=generator).numpy()
    else:  # a slice of the kept draws, at a tenth of the cost of new ones
        start = int(torch.randint(len(draws) - x.size + 1, (), generator=generator))
        noise = draws[start : start + x.size].reshape(x.shape)
    colour = np.exp(_LN10 * (level + tilt * np.linspace(-1, 1, len(x), dtype=np.float32)))
    power = np.exp((x - 1) * np.float32(4 * _LN10))
    power += noise * colour[:, None].astype(np.float32)
    noisy = np.log(power, out=power)
    noisy *= np.float32(0.25 / _LN10)
    noisy += 1
    if floor is None:
        floor = max(x.max(), noisy.max()) - 2  # 8 below the loudest band, in units of 4
    return torch.from_numpy(np.maximum(noisy, floor, out=noisy))


@lru_cache(maxsize=1)
def _exponential() -> np.ndarray:
    """A million draws from the exponential distribution of mean 1, always the same."""
    return torch.empty(1 << 20).exponential_(generator=torch.Generator().manual_seed(0)).clamp_(min=1e-4).numpy()


RANGE = 3.0
"""Log10 of power (30 dB) by which a frame of speech may lie below the clip's loudest."""

FAINTEST = -6.0
"""Log10 of the mean power of the faintest speech: 10 dB above the fixed floor of features (`omni.audio.mel.FIXED_FLOOR`)."""

GAP = 1.5
"""Log10 of power (15 dB) by which a place between words lies below the clip's loudest frame, at least."""

AROUND = 3
"""Feature frames on either side of such a place that are no quieter."""


def energy(mel: Tensor) -> Tensor:
    """Log10 of the power of each frame of features [M, F], averaged over the bands: [F]."""
    return torch.pow(10.0, 4 * mel.float() - 4).mean(0).log10()


def speech(mel: Tensor) -> Tensor:
    """Frames of clean features [M, F] with speech, [F] bool: those within `RANGE` of the loudest and above `FAINTEST`."""
    power = energy(mel)
    return power >= power.max().clamp_min(FAINTEST + RANGE) - RANGE


def gaps(mel: Tensor, voice: Tensor) -> list[int]:
    """Places f of features [M, F] where words may part: the quietest frames around, between the first and last with speech."""
    spoken = voice.nonzero().flatten()
    if not len(spoken):
        return []
    power = energy(mel)
    low = -torch.nn.functional.max_pool1d(-power[None], 2 * AROUND + 1, 1, AROUND)[0]
    quiet = (power == low) & (power <= power.max() - GAP)
    quiet[: spoken[0] + 1] = quiet[spoken[-1] :] = False
    minima = quiet.nonzero().flatten().tolist()
    return [f for f in minima if not quiet[f - 1]]  # of a run, the first


def insert(x: Tensor, places: Sequence[tuple[int, int]], value: float | bool) -> Tensor:
    """Puts runs of equal values into [..., F]. `places`: (f, length) of each run, which comes before frame f; ascending."""
    pieces, start = [], 0
    for frame, length in places:
        pieces += [x[..., start:frame], x.new_full((*x.shape[:-1], length), value)]
        start = frame
    return torch.cat([*pieces, x[..., start:]], dim=-1)
