"""Configuration of a Whisper encoder: its shape, features and number of frames.

S samples of 16 kHz sound, T encoder frames (two feature frames each), M mel bands, F feature frames, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from omni.audio.io import SAMPLE_RATE
from omni.audio.mel import HOP, LOWEST, WINDOW, MelFloor, log_mel, mel_frames
from omni.encoder.config import ENCODERS, EncoderConfig, LongAudio
from omni.errors import UserError, warn_about_sound
from omni.utils.configuration import configuration

if TYPE_CHECKING:
    from torch import Tensor


EncoderMode = Literal["padded", "variable", "chunked"]
Normalize = Literal["none", "clip"]


@configuration
class WhisperConfig(EncoderConfig):
    """Shape of a Whisper encoder and preprocessing of its sound; training and serving of a model share it.

    mode: "variable" runs on the sound alone; "padded" runs on the whole window, silence included,
    and keeps the frames of the sound, as checkpoints trained with Whisper's padding expect (mini-omni). "chunked" runs on the
    sound while it is still coming: a frame hears its chunk and what came before, features have a fixed floor, and nothing looks
    ahead (block-causal attention; chunk lengths drawn in training as by Zhang et al. 2020, WeNet).

    chunk_ms: length of a chunk of "chunked" where it answers, 0 for the whole clip. Any that was trained will do.

    train_chunk_ms: shortest and longest chunk in training. Each batch draws one, evenly on a logarithmic scale; one batch of
    four is heard whole.

    history_ms: what a frame hears before its chunk, None for all of its clip.

    long_audio: sound beyond the window is refused ("refuse"), or split into consecutive windows whose frames are joined
    ("split"). It is never cut.

    hop: samples between feature frames; a released Whisper needs 160 (50 encoder frames a second), a model trained from
    scratch may take 320 and half the work.

    normalize: "clip" subtracts each band's mean over a clip and divides by the standard deviation of the rest, so that
    different microphones and rooms sound alike (cepstral mean and variance normalisation, Viikki and Laurila 1998, before
    the cosine transform); "none" is Whisper's.

    mel_range: lower end of normalised features below the clip's loudest band, in log10 of power: 8 as in Whisper; with 4.4
    no background is heard.

    mel_blur: standard deviation, in bands, of a Gaussian over the bands, which hides the pitch and keeps the formants of
    normalised features; 0 for none.

    UserError: a value that no encoder can have.
    """

    kind: ClassVar[str] = "whisper"
    n_mels: int = 80
    width: Annotated[int, Field(ge=4, le=1 << 20)] = 384
    heads: PositiveInt = 6
    layers: Annotated[int, Field(ge=1, le=1000)] = 4
    window_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    mode: EncoderMode = "variable"
    mel_floor: MelFloor = "clip"
    long_audio: LongAudio = "refuse"
    hop: int = HOP
    normalize: Normalize = "none"
    mel_range: Annotated[float, Field(ge=0.5, le=8)] = 8.0
    mel_blur: Annotated[float, Field(ge=0, le=10)] = 0.0
    chunk_ms: int = 320
    train_chunk_ms: tuple[int, int] = (160, 1280)
    history_ms: int | None = None

    def __post_init__(self) -> None:
        if self.n_mels not in (80, 128):
            raise UserError(f"encoder.n_mels={self.n_mels}: Whisper's filter banks have 80 or 128 bands")
        if self.width % 2 or self.width % self.heads:
            raise UserError(f"encoder.width={self.width}: it must be even and divisible by heads={self.heads}")
        if not 1 <= self.hop <= WINDOW or SAMPLE_RATE % (2 * self.hop):
            raise UserError(
                f"encoder.hop={self.hop}: it must divide {SAMPLE_RATE // 2} and be at most {WINDOW}, as 160 and 320"
            )
        if self.mode == "padded" and (self.hop, self.normalize) != (HOP, "none"):
            raise UserError(
                f"encoder.hop={self.hop}, encoder.normalize={self.normalize}: mode=padded is for released checkpoints, theirs "
                f"are {HOP} and none"
            )
        if self.normalize == "none" and (self.mel_range, self.mel_blur) != (8.0, 0.0):
            raise UserError(
                f"encoder.mel_range={self.mel_range}, encoder.mel_blur={self.mel_blur}: they are 8 and 0 where "
                "encoder.normalize is none"
            )
        if self.mode == "chunked":
            self._check_chunks()
        positions = self.window_seconds * self.frames_per_second
        if positions <= 0.5 or abs(positions - round(positions)) > 1e-6:
            frame = 1 / self.frames_per_second
            raise UserError(f"encoder.window_seconds={self.window_seconds}: give a multiple of {frame:g} s above 0")

    def _check_chunks(self) -> None:
        if self.normalize != "none":
            raise UserError(f"encoder.normalize={self.normalize}: mode=chunked cannot know the rest of a clip; take none")
        frame, (low, high) = 1000 / self.frames_per_second, self.train_chunk_ms
        for name, value, zero in (
            ("chunk_ms", self.chunk_ms or frame, ", or 0 for the whole clip"),
            ("train_chunk_ms", low, ""),
            ("train_chunk_ms", high, ""),
            ("history_ms", frame if self.history_ms is None else self.history_ms, ", or null for all of the clip"),
        ):
            if not frame <= value <= 1000 * self.window_seconds or value % frame:
                raise UserError(
                    f"encoder.{name}={value:g}: give a multiple of a frame, {frame:g} ms, up to the window's "
                    f"{self.window_seconds:g} s{zero}"
                )
        if low > high:
            raise UserError(f"encoder.train_chunk_ms={low} to {high}: the shortest comes first")

    def frames_in(self, milliseconds: float) -> int:
        """Encoder frames of so many milliseconds."""
        return round(milliseconds * self.frames_per_second / 1000)

    @property
    def bands(self) -> int:
        return self.n_mels

    @property
    def frames_per_second(self) -> int:
        """Encoder frames per second: two feature frames each (50 at Whisper's hop)."""
        return SAMPLE_RATE // (2 * self.hop)

    @property
    def positions(self) -> int:
        """Encoder frames of a full window, Whisper's `n_audio_ctx` (1500 for 30 s)."""
        return round(self.window_seconds * self.frames_per_second)

    @property
    def max_samples(self) -> int:
        return self.positions * 2 * self.hop

    @property
    def fixed_length(self) -> bool:
        return self.mode == "padded"

    @property
    def feature_floor(self) -> float | None:
        return LOWEST if self.mel_floor == "fixed" or self.mode == "chunked" else None

    @property
    def chunk_samples(self) -> int | None:
        return self.chunk_ms * SAMPLE_RATE // 1000 or None if self.mode == "chunked" else None

    @property
    def streams(self) -> bool:
        return self.mode == "chunked"

    @property
    def attention_size(self) -> int:
        return self.layers * self.width

    def feature_frames(self, frames: int) -> int:
        return 2 * (self.positions if self.fixed_length else frames)

    def frames_of(self, features: int) -> int:
        return (features + 1) // 2

    def clip_frames(self, samples: int) -> int:
        """Encoder frames T of a clip.

        variable, chunked: half the feature frames, rounded up. padded: int(milliseconds / 20) + 1, at most the
        window's (the rule of gpt-omni/mini-omni, `inference.py`, `load_audio`, in its own floating-point
        steps: integers differ at nine lengths).
        """
        if self.mode != "padded":
            return (mel_frames(samples, self.hop) + 1) // 2
        milliseconds = samples / SAMPLE_RATE * 1000
        return min(int(milliseconds / 20) + 1, self.positions)

    def features(self, audio: Tensor) -> Tensor:
        """Log-mel `[M, F]` float32 of one clip `[S]` at 16 kHz, F = `mel_frames(S)`, without gradient.

        padded: silence is appended up to the window first, as Whisper does.
        UserError: no samples, or longer than the window (`split` it first).
        """
        import torch

        samples = audio.shape[0]
        if samples > self.max_samples:
            self.clips(samples)  # refuses where the configuration does
            raise UserError(f"a clip of {samples} samples exceeds the window of {self.max_samples}: split() it first")
        with torch.no_grad():
            if self.fixed_length:
                audio = torch.nn.functional.pad(audio, (0, self.max_samples - samples))
            if self.mode == "chunked":
                return log_mel(audio, self.n_mels, "fixed", self.hop, audio.new_zeros(WINDOW - self.hop))
            return log_mel(audio, self.n_mels, self.mel_floor, self.hop)

    def with_chunk(self, milliseconds: int) -> EncoderConfig:
        if self.mode != "chunked":
            return super().with_chunk(milliseconds)
        (low, high), chosen = self.train_chunk_ms, replace(self, chunk_ms=milliseconds)
        if milliseconds and not low <= milliseconds <= high:
            warn_about_sound(
                f"chunk_ms is {milliseconds}, and the encoder was trained with chunks of {low} to {high} ms: it hears worse"
            )
        return chosen


ENCODERS.add(WhisperConfig.kind, WhisperConfig)

# Published sizes: the `ModelDimensions` stored in OpenAI's checkpoints, also tabled in "Robust Speech
# Recognition via Large-Scale Weak Supervision" (Radford et al. 2022, table 1). The turbo model keeps
# large-v3's encoder.
ENCODER_PRESETS: dict[str, WhisperConfig] = {
    "nano": WhisperConfig(width=192, heads=3, layers=3, hop=320),
    "tiny": WhisperConfig(width=384, heads=6, layers=4),
    "base": WhisperConfig(width=512, heads=8, layers=6),
    "small": WhisperConfig(width=768, heads=12, layers=12),
    "medium": WhisperConfig(width=1024, heads=16, layers=24),
    "large": WhisperConfig(width=1280, heads=20, layers=32),
    "large-v3": WhisperConfig(n_mels=128, width=1280, heads=20, layers=32),
    "large-v3-turbo": WhisperConfig(n_mels=128, width=1280, heads=20, layers=32),
}
"""Sizes by name, all `variable` with Whisper's floor; `dataclasses.replace` changes the rest."""
