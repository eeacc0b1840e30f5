"""Configuration of the augmentation of training sound; `train.data.augment.audio` applies it."""

from __future__ import annotations

from dataclasses import dataclass

from omni.errors import UserError
from omni.utils.ranges import check_fields, ranged

Range = tuple[float, float]


@dataclass(frozen=True)
class AugmentConfig:
    """Settings of the augmentation. The default changes nothing. A range is (lowest, highest), drawn uniformly.

    UserError: a range upside down or out of its bounds, a probability beyond 1.
    """

    speed: Range | None = ranged(None, 0.25, 4)
    """Playing speed, in steps of 0.01, pitch and length changing with it: (0.9, 1.1)."""
    noise_snr_db: Range | None = ranged(None, -60, 120)
    """Power of the clip over the power of the noise added to it, in dB: (5, 30)."""
    noise_probability: float = ranged(1.0, 0, 1)
    """Part of the clips that noise is added to."""
    noise_colour: Range = ranged((0.0, 1.0), -2, 4)
    """Generated noise falls with frequency as 1 / f**colour in power: 0 white, 1 pink, 2 brown."""
    noise_folder: str | None = None
    """Sound files to take noise from, searched in all folders below. None: generated noise only."""
    noise_file_probability: float = ranged(0.5, 0, 1)
    """Part of the noise that comes from the files, where there is a folder."""
    gain_db: Range | None = ranged(None, -120, 60)
    """Loudness change in dB: (-12, 6). The result is not clipped: features are taken from it as it is."""
    warp_speed: Range | None = ranged(None, 0.25, 4)
    """Playing speed, by stretching the features over time: (0.9, 1.1)."""
    warp_bands: Range | None = ranged(None, 0.5, 2)
    """Length of the speaker's vocal tract, by stretching the features over the mel bands: (0.9, 1.1)."""
    feature_noise: Range | None = ranged(None, -20, 10)
    """Log10 of the power of noise added to the features (speech peaks near 1): (-6, -1)."""
    feature_noise_probability: float = ranged(0.5, 0, 1)
    """Part of the clips that such noise is added to."""
    feature_gain_db: Range | None = ranged(None, -120, 60)
    """Loudness change of the features in dB: (-16, 8)."""
    feature_shape_db: float | None = ranged(None, 0, 40)
    """Another microphone: a smooth curve over the mel bands, its standard deviation up to this many dB."""
    feature_echo: Range | None = ranged(None, 1, 1000)
    """Frames in which the echo of another room falls by 60 dB: (5, 35)."""
    feature_echo_db: Range = ranged((-18.0, -3.0), -60, 20)
    """Power of all of the echo relative to the sound itself, in dB."""
    feature_echo_probability: float = ranged(0.5, 0, 1)
    """Part of the clips that echo."""
    feature_range: Range | None = ranged(None, 0.5, 8)
    """Another recorder's floor: what lies further below the loudest band, in log10 of power, is raised to it: (3.4, 5.4)."""
    pauses: Range | None = ranged(None, 0, 10)
    """Seconds of silence that is put between words, as speakers who think do: (0.2, 1.0)."""
    pause_probability: float = ranged(0.5, 0, 1)
    """Part of the clips with such pauses: one, or as often two."""
    pause_before: Range = ranged((0.0, 0.8), 0, 10)
    """Seconds of silence before the first sound of all clips, where there are `pauses`."""
    pause_after: Range = ranged((0.0, 1.6), 0, 10)
    """The same after the last sound. Longer than `pauses`: a silence longer than any of them is an end."""
    freq_masks: int = ranged(0, 0)
    """Number of masks over mel bands, each of 0 to `freq_width` bands."""
    freq_width: int = ranged(12, 0)
    time_masks: int = ranged(0, 0)
    """Number of masks over time, each of 0 to `time_width` frames and never over `time_fraction` of the
    clip."""
    time_width: int = ranged(20, 0)
    time_fraction: float = ranged(0.2, 0, 1)

    def __post_init__(self) -> None:
        check_fields(self, "augment")
        if self.noise_folder is not None and self.noise_snr_db is None:
            raise UserError(f"augment.noise_folder={self.noise_folder!r} without noise_snr_db: say how loud the noise is")
