"""Contract of a speech encoder, first part: its configuration, which lays out prompts and computes features without the model.

    config.split(sound)        clips [S]: one, or consecutive windows of a sound that is longer than the encoder takes
    config.features(clip)      features [M, F] of a clip
    config.frames(samples)     frames T that the encoder makes of a sound
    config.prepare(sound)      all of these of a sound, as the encoder takes it

S samples of 16 kHz sound, M values of a feature frame, F feature frames, T encoder frames, D width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from omni.audio.io import SAMPLE_RATE
from omni.errors import UserError
from omni.plugins import Registry

if TYPE_CHECKING:
    from torch import Tensor

LongAudio = Literal["refuse", "split"]


class PreparedSound(NamedTuple):
    """Features [M, F] of a sound's clips, the number of each one's frames, and that of the sound's."""

    features: list[Tensor]
    clip_frames: list[int]
    frames: int


class EncoderConfig(ABC):
    """Configuration of an encoder: a frozen dataclass.

    Attributes:
        kind: its name; models choose it by `encoder: {kind: ...}`.
        width: values D of a frame.
        layers: number of equal blocks, 0 for none.
        long_audio: a sound longer than the encoder takes is refused ("refuse"), or split into windows ("split").
    """

    kind: ClassVar[str] = ""
    width: int
    layers: int = 0
    long_audio: LongAudio = "refuse"

    # --- to be written ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def bands(self) -> int:
        """Values M of a feature frame."""

    @property
    @abstractmethod
    def frames_per_second(self) -> float:
        """Frames T of a second of sound."""

    @property
    @abstractmethod
    def max_samples(self) -> int:
        """Samples of the longest clip."""

    @abstractmethod
    def features(self, audio: Tensor) -> Tensor:
        """Features [M, F] float32 of one clip [S] of at most `max_samples`, without gradient."""

    @abstractmethod
    def clip_frames(self, samples: int) -> int:
        """Frames T of a clip of that many samples, 1 to `max_samples`."""

    @abstractmethod
    def feature_frames(self, frames: int) -> int:
        """Most feature frames F of a clip of T frames."""

    def frames_of(self, features: int) -> int:
        """Frames T of F feature frames whose number augmentation has changed (not asked where `fixed_length`)."""
        raise UserError(f"data.augment changes the number of features, not for encoder {self.kind!r}: leave it out")

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def fixed_length(self) -> bool:
        """True where every clip costs the encoder its whole window, however short it is."""
        return False

    @property
    def feature_floor(self) -> float | None:
        """Least value of a feature, the same for every sound; None where it follows from the sound, or there is none."""
        return None

    @property
    def chunk_samples(self) -> int | None:
        """Samples after which `Encoder.stream` gives the next frames; None where it gives all of them at the end."""
        return None

    @property
    def streams(self) -> bool:
        """True where a frame hears its chunk and what came before, so that frames come while the sound does."""
        return self.chunk_samples is not None

    @property
    def attention_size(self) -> int:
        """Layers times width of what attends, for FLOPs; 0 without attention."""
        return 0

    @property
    def positions(self) -> int:
        """Frames of the longest clip."""
        return self.clip_frames(self.max_samples)

    @property
    def window_seconds(self) -> float:
        """Seconds of the longest clip."""
        return self.max_samples / SAMPLE_RATE

    def clips(self, samples: int) -> list[int]:
        """Lengths in samples of the clips of a sound: several where it is split. UserError: no samples, or more than the
        encoder takes where `long_audio` is "refuse"."""
        if samples < 1:
            raise UserError("the sound holds no samples: give at least one")
        if samples <= self.max_samples:
            return [samples]
        if self.long_audio == "refuse":
            raise UserError(
                f"the sound lasts {samples / SAMPLE_RATE:.1f} s and the encoder takes {self.window_seconds:g} s "
                "at once: cut it, or set encoder.long_audio=split (consecutive windows, their frames joined)"
            )
        whole, rest = divmod(samples, self.max_samples)
        return [self.max_samples] * whole + [rest] * (rest > 0)

    def split(self, audio: Tensor) -> list[Tensor]:
        """The clips of a sound [S]; UserError as of `clips`."""
        if audio.ndim != 1:
            raise UserError(f"sound of shape {list(audio.shape)} for the encoder: give one channel, [samples]")
        return list(audio.split(self.clips(audio.shape[0])))

    def frames(self, samples: int) -> int:
        """Frames T of a sound of that many samples, summed over its clips; UserError as of `clips`."""
        return sum(self.clip_frames(clip) for clip in self.clips(samples))

    def prepare(self, audio: Tensor) -> PreparedSound:
        """A whole sound [S] as `Encoder.encode` takes it, for whoever has the time before; UserError as of `clips`."""
        import torch

        clips = self.split(audio)
        with torch.no_grad():
            features = [self.features(clip) for clip in clips]
        return PreparedSound(features, [self.clip_frames(len(clip)) for clip in clips], self.frames(len(audio)))

    def with_chunk(self, milliseconds: int) -> EncoderConfig:
        """A copy with chunks of another length; UserError for an encoder that hears whole clips only."""
        raise UserError(
            f"chunk_ms is {milliseconds}, but this encoder ({self.kind}) hears whole clips only: leave it out, or train one "
            "with encoder.mode=chunked"
        )


ENCODERS: Registry[type[EncoderConfig]] = Registry("encoder")
"""Configurations of encoders by kind; `omni.encoder.base.register_encoder` adds one with its module."""
