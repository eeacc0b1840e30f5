"""Sound in: files, bytes and raw PCM to mono tensors `[S]` float32 at the rate the caller asks for.

Everything a person may hand over by mistake (a folder, a text file, half a download, three hours, eight
channels, NaN) is refused here with one line that names the source, the value and the way out, so that
nothing behind this door has to look again. WAV files are written by `omni.audio.wav`, whose names are
exported here too.

S samples, C channels.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd
from typing import BinaryIO, Literal

import numpy as np
import soundfile
import torch
import torchaudio
from torch import Tensor

from omni.audio.wav import WavWriter, pcm16, write_wav
from omni.errors import UserError

__all__ = [
    "MAX_SECONDS",
    "SAMPLE_RATE",
    "AudioInfo",
    "AudioSource",
    "WavWriter",
    "audio_info",
    "from_pcm16",
    "pcm16",
    "read_audio",
    "resample",
    "write_wav",
]

SAMPLE_RATE = 16_000
"""Samples per second of everything the encoder hears."""

MAX_SECONDS = 1800.0
"""Longest file read unless the caller says otherwise: half an hour, 115 MB of float32 at 16 kHz."""

AudioSource = str | os.PathLike[str] | bytes | BinaryIO
"""A path, the bytes of a file, or an open binary file."""

_BLOCK = 1 << 18  # frames decoded at a time, so that no header can ask for memory that the data does not fill
_STREAMED = 0x7FFF0000  # a size from here up is what programs write into a pipe, where they cannot know it
_FRAMES = 1 << 17  # frames of a resampling product done at a time
_MAX_KERNEL = 1 << 24  # elements of a resampling kernel; only rates without a common divisor come near


@dataclass(frozen=True)
class AudioInfo:
    """What the header of a sound file says; nothing is decoded."""

    sample_rate: int
    samples: int
    """Samples per channel."""
    channels: int
    format: str
    """Container and coding as libsndfile names them, such as "WAV PCM_16"."""

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate


def read_audio(
    source: AudioSource,
    sample_rate: int = SAMPLE_RATE,
    *,
    max_seconds: float | None = MAX_SECONDS,
    channel: int | Literal["mix"] = "mix",
) -> Tensor:
    """Read WAV, FLAC, OGG or MP3 as mono `[S]` float32 at `sample_rate` samples per second.

    `channel="mix"` averages one or two channels; a number takes that channel (from 0) of any file.
    `max_seconds=None` lifts the limit on length, which is otherwise checked against the header before
    anything is decoded. Silence is sound and passes. UserError: missing, a folder, empty, not a sound file,
    truncated, without samples, too long, more than two channels and none chosen, NaN or infinity, a rate
    that cannot be converted."""
    name = _name(source)
    with _open(source, name) as file:
        rate, promised = file.samplerate, file.frames
        if max_seconds is not None and promised > max_seconds * rate:
            raise _too_long(name, promised / rate, max_seconds)
        if channel == "mix" and file.channels > 2:
            raise UserError(
                f"{name} has {file.channels} channels and only 1 or 2 are mixed: choose one with "
                f"channel=0 to channel={file.channels - 1}"
            )
        if channel != "mix" and not 0 <= channel < file.channels:
            raise UserError(f"{name} has no channel {channel}: it has {file.channels}, counted from 0")
        samples = _decode(file, name, max_seconds, channel)
    if len(samples) + rate // 10 < promised:  # a tenth of a second: MP3 headers count their padding loosely
        raise _truncated(name, len(samples) / rate, promised / rate)
    if len(samples) == 0:
        raise UserError(f"{name} holds no samples: record or convert it again")
    finite = np.isfinite(samples)
    if not finite.all():
        raise UserError(
            f"{name} holds NaN or infinity at {int(finite.argmin()) / rate:.3f} s: mend it, or write it again as 16-bit PCM"
        )
    return resample(torch.from_numpy(samples), rate, sample_rate, name=name)


def audio_info(source: AudioSource) -> AudioInfo:
    """Read the header of a sound file. UserError: missing, a folder, empty, not a sound file, a truncated
    WAV."""
    name = _name(source)
    with _open(source, name) as file:
        return AudioInfo(file.samplerate, file.frames, file.channels, f"{file.format} {file.subtype}")


def from_pcm16(data: bytes, source_rate: int, sample_rate: int = SAMPLE_RATE) -> Tensor:
    """Turn raw mono 16-bit little-endian PCM at `source_rate` into `[S]` float32 in [-1, 1) at `sample_rate`.

    UserError: no data, or an odd number of bytes.
    """
    if not data or len(data) % 2:
        raise UserError(
            f"{len(data)} bytes are not 16-bit PCM: it takes two bytes a sample and at least one sample "
            "(signed, little-endian, mono)"
        )
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768.0
    return resample(torch.from_numpy(samples), source_rate, sample_rate, name="PCM on input")


def resample(audio: Tensor, source_rate: int, sample_rate: int, *, name: str = "audio") -> Tensor:
    """Convert `[..., S]` float32 from one rate to another: `[..., ceil(S * sample_rate / source_rate)]`.

    The filter is `torchaudio.functional.resample`'s default (windowed sinc, 6 zero crossings a side), made
    once for each pair of rates and applied as one matrix product: torchaudio's convolution is planned anew
    for every length that it has not met, which costs up to fifteen times the product (22,050 to 16,000 Hz,
    two seconds). `name` is what a UserError calls the sound.
    """
    if source_rate < 1 or sample_rate < 1:
        raise UserError(f"{name}: cannot convert {source_rate} Hz to {sample_rate} Hz: rates start at 1")
    if source_rate == sample_rate:
        return audio
    divisor = gcd(source_rate, sample_rate)
    source, target = source_rate // divisor, sample_rate // divisor
    if target * (source + 12 * ceil(source / target)) > _MAX_KERNEL:
        raise UserError(
            f"{name}: {source_rate} Hz cannot be converted to {sample_rate} Hz, their common divisor {divisor} is too "
            "small: convert it to a usual rate first, such as 16000, 22050, 24000, 44100 or 48000"
        )
    kernel, before = _filter(source, target)
    padded = torch.nn.functional.pad(audio, (before, before + source))
    kernel = kernel.to(audio.device)
    frames = padded.unfold(-1, kernel.shape[0], source)  # [..., n, taps], each n gives `target` samples
    # In parts, because the product copies the frames, which overlap.
    converted = torch.cat([part @ kernel for part in frames.split(_FRAMES, dim=-2)], dim=-2)
    return converted.flatten(-2)[..., : ceil(target * audio.shape[-1] / source)]


@lru_cache(maxsize=64)
def _filter(source: int, target: int) -> tuple[Tensor, int]:
    """Filter `[taps, target]` between two rates without a common divisor, and the samples it reaches back."""
    made = torchaudio.transforms.Resample(source, target, dtype=torch.float64)
    return made.kernel[:, 0].T.float().contiguous(), made.width


# ------------------------------------------------------------------------------------ opening and decoding


def _name(source: AudioSource) -> str:
    """What an error calls the source."""
    if isinstance(source, bytes):
        return f"sound of {len(source)} bytes"
    if isinstance(source, (str, os.PathLike)):
        return repr(os.fspath(source))
    return repr(getattr(source, "name", "open file"))


def _open(source: AudioSource, name: str) -> soundfile.SoundFile:
    """Open for decoding, after the checks that libsndfile does not make."""
    if isinstance(source, (str, os.PathLike)):
        try:
            mode = os.stat(source).st_mode
        except OSError as error:
            raise UserError(f"{name}: {error.strerror or error}: check the path of the sound file") from error
        if stat.S_ISDIR(mode):
            raise UserError(f"{name} is a folder: name one sound file in it")
        if stat.S_ISREG(mode):
            try:
                with open(source, "rb") as file:
                    _check(file, name)
            except OSError as error:
                raise UserError(f"{name}: {error.strerror or error}: check that it may be read") from error
            return _sound_file(os.fsencode(source), name)
        with open(source, "rb") as pipe:
            source = pipe.read()
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    elif not source.seekable():
        source = io.BytesIO(source.read())
    _check(source, name)
    return _sound_file(source, name)


def _sound_file(file: bytes | BinaryIO, name: str) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(file)
    except soundfile.SoundFileError as error:
        raise UserError(
            f"{name} is not a sound file that can be read, or its beginning is damaged: convert it to WAV, FLAC, OGG or MP3"
        ) from error
    except TypeError as error:  # what soundfile raises for a name that ends in .raw
        raise UserError(f"{name} has no header: give raw PCM with its sample rate instead, or convert it to WAV") from error


def _check(file: BinaryIO, name: str) -> None:
    """Refuse an empty file, and a WAV whose header promises more than the file holds (libsndfile plays what
    is there)."""
    start = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(start)
    if size == start:
        raise UserError(f"{name} is empty (0 bytes): record or download it again")
    head = file.read(12)
    rate = 0
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        while len(chunk := file.read(8)) == 8:
            kind, length = struct.unpack("<4sI", chunk)
            if kind == b"fmt " and length >= 16:
                body = file.read(16)
                rate = struct.unpack("<I", body[8:12])[0] if len(body) == 16 else 0  # bytes per second
                length -= 16
            if kind == b"data":
                held = size - file.tell()
                if held < length < _STREAMED and rate:
                    raise _truncated(name, held / rate, length / rate)
                break
            file.seek(length + length % 2, os.SEEK_CUR)
    file.seek(start)


def _decode(file: soundfile.SoundFile, name: str, max_seconds: float | None, channel: int | Literal["mix"]) -> np.ndarray:
    """All samples `[S]` float32 of the chosen channel, block by block."""
    blocks: list[np.ndarray] = [np.zeros(0, np.float32)]
    total = 0
    while True:
        try:
            block = file.read(_BLOCK, dtype="float32", always_2d=True)  # [S, C]
        except soundfile.SoundFileError as error:
            raise UserError(
                f"{name} is damaged or cut short after {total / file.samplerate:.2f} s: download or convert it again"
            ) from error
        if not len(block):
            return np.concatenate(blocks)
        total += len(block)
        if max_seconds is not None and total > max_seconds * file.samplerate:
            raise _too_long(name, total / file.samplerate, max_seconds)
        blocks.append(block.mean(axis=1) if channel == "mix" else block[:, channel])


def _truncated(name: str, found: float, promised: float) -> UserError:
    return UserError(
        f"{name} is truncated: its header promises {promised:.2f} s and {found:.2f} s are there: "
        "copy or download it again, or convert what is left"
    )


def _too_long(name: str, seconds: float, limit: float) -> UserError:
    return UserError(f"{name} lasts {seconds:.1f} s or more and the limit is {limit:g} s: cut it, or raise max_seconds")
