"""Configuration of the augmentation of training sound; `train.data.augment.audio` applies it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from omni.errors import UserError

Range = tuple[float, float]


@dataclass(frozen=True)
class AugmentConfig:
    """Settings of the augmentation. The default changes nothing. A range is (lowest, highest), drawn uniformly.

    UserError: a range upside down or out of its bounds, a probability beyond 1.
    """

    speed: Range | None = None
    """Playing speed, in steps of 0.01, pitch and length changing with it: (0.9, 1.1)."""
    noise_snr_db: Range | None = None
    """Power of the clip over the power of the noise added to it, in dB: (5, 30)."""
    noise_probability: float = 1.0
    """Part of the clips that noise is added to."""
    noise_colour: Range = (0.0, 1.0)
    """Generated noise falls with frequency as 1 / f**colour in power: 0 white, 1 pink, 2 brown."""
    noise_folder: str | None = None
    """Sound files to take noise from, searched in all folders below. None: generated noise only."""
    noise_file_probability: float = 0.5
    """Part of the noise that comes from the files, where there is a folder."""
    gain_db: Range | None = None
    """Loudness change in dB: (-12, 6). The result is not clipped: features are taken from it as it is."""
    warp_speed: Range | None = None
    """Playing speed, by stretching the features over time: (0.9, 1.1)."""
    warp_bands: Range | None = None
    """Length of the speaker's vocal tract, by stretching the features over the mel bands: (0.9, 1.1)."""
    feature_noise: Range | None = None
    """Log10 of the power of noise added to the features (speech peaks near 1): (-6, -1)."""
    feature_noise_probability: float = 0.5
    """Part of the clips that such noise is added to."""
    feature_gain_db: Range | None = None
    """Loudness change of the features in dB: (-16, 8)."""
    feature_shape_db: float | None = None
    """Another microphone: a smooth curve over the mel bands, its standard deviation up to this many dB."""
    feature_echo: Range | None = None
    """Frames in which the echo of another room falls by 60 dB: (5, 35)."""
    feature_echo_db: Range = (-18.0, -3.0)
    """Power of all of the echo relative to the sound itself, in dB."""
    feature_echo_probability: float = 0.5
    """Part of the clips that echo."""
    feature_range: Range | None = None
    """Another recorder's floor: what lies further below the loudest band, in log10 of power, is raised to it: (3.4, 5.4)."""
    freq_masks: int = 0
    """Number of masks over mel bands, each of 0 to `freq_width` bands."""
    freq_width: int = 12
    time_masks: int = 0
    """Number of masks over time, each of 0 to `time_width` frames and never over `time_fraction` of the
    clip."""
    time_width: int = 20
    time_fraction: float = 0.2

    def __post_init__(self) -> None:
        for key, low, high in (
            ("speed", 0.25, 4.0),
            ("noise_snr_db", -60.0, 120.0),
            ("noise_colour", -2.0, 4.0),
            ("gain_db", -120.0, 60.0),
            ("warp_speed", 0.25, 4.0),
            ("warp_bands", 0.5, 2.0),
            ("feature_noise", -20.0, 10.0),
            ("feature_gain_db", -120.0, 60.0),
            ("feature_echo", 1.0, 1000.0),
            ("feature_echo_db", -60.0, 20.0),
            ("feature_range", 0.5, 8.0),
        ):
            drawn = getattr(self, key)
            if drawn is None:
                continue
            if len(drawn) != 2 or not all(isfinite(x) for x in drawn) or not low <= drawn[0] <= drawn[1] <= high:
                raise UserError(f"augment.{key}={drawn}: give lowest and highest, between {low:g} and {high:g}")
        if self.feature_shape_db is not None and not 0 <= self.feature_shape_db <= 40:
            raise UserError(f"augment.feature_shape_db={self.feature_shape_db}: give a number from 0 to 40")
        for key in (
            "noise_probability",
            "noise_file_probability",
            "feature_noise_probability",
            "feature_echo_probability",
            "time_fraction",
        ):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise UserError(f"augment.{key}={getattr(self, key)}: give a number from 0 to 1")
        for key in ("freq_masks", "freq_width", "time_masks", "time_width"):
            if getattr(self, key) < 0:
                raise UserError(f"augment.{key}={getattr(self, key)}: it cannot be below 0")
        if self.noise_folder is not None and self.noise_snr_db is None:
            raise UserError(f"augment.noise_folder={self.noise_folder!r} without noise_snr_db: say how loud the noise is")
