"""Reads sound files, bytes and raw PCM as mono tensors `[S]` float32 at the rate the caller asks for.

What a person may hand over by mistake (a folder, a text file, half a download, three hours, eight channels, NaN) is refused
here in one line, before memory is taken for it, so that no caller has to check again. Sound that is accepted but may not be
what was meant gives a `SoundWarning`.

S samples, C channels.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from omni.audio.decode import HEAD, Block, Recording, container, foreign, open_recording
from omni.audio.resample import StreamResampler, resample
from omni.errors import UserError, warn_about_sound
from omni.utils.remote import refuse_remote

if TYPE_CHECKING:
    from torch import Tensor

QUIET_DBFS = -60.0  # below this level a clip counts as silent

SHORT_SECONDS = 0.1  # shortest clip in which anything can be said

_CANCELLED = 0.01  # share of the louder channel's energy that is left when opposite channels are averaged


def level(clip: Tensor, sample_rate: int) -> float:
    """Level of `[S]`, S at least 1, in decibels relative to full scale: the RMS of its loudest 100 ms without their mean (a
    constant is not heard); -inf for silence."""
    import torch

    window = max(1, round(SHORT_SECONDS * sample_rate))
    pieces = list(clip.float().split(window))
    whole = torch.stack(pieces[:-1]) if len(pieces) > 1 else clip.new_zeros(1, 1, dtype=torch.float32)
    power = max(float(whole.var(dim=1, correction=0).max()), float(pieces[-1].var(correction=0)) * len(pieces[-1]) / window)
    return 10 * math.log10(power) if power > 1e-20 else -math.inf


def sound_warnings(clip: Tensor, sample_rate: int) -> list[str]:
    """Reasons to doubt that anything is said in `[S]`, S at least 1, as ends of sentences about it."""
    reasons = []
    if (seconds := len(clip) / sample_rate) < SHORT_SECONDS:
        reasons.append(f"lasts {seconds * 1e3:.3g} ms, and nothing can be said in under {SHORT_SECONDS * 1e3:.0f} ms")
    if (loudest := level(clip, sample_rate)) < QUIET_DBFS:
        silence = "is silence" if loudest == -math.inf else f"is silent: its loudest 100 ms reach {loudest:.0f} dBFS"
        reasons.append(f"{silence}, and speech lies above {QUIET_DBFS:.0f} dBFS")
    return reasons


def cancelled(mixed: float, channels: Sequence[float]) -> int | None:
    """The loudest channel where the mean of all of them has lost nearly all sound (they are of opposite phase), from the
    energies of the mean and of each channel; else None."""
    loudest = max(range(len(channels)), key=channels.__getitem__)
    return loudest if mixed < _CANCELLED * channels[loudest] else None


ONE_CHANNEL = "two channels are of opposite phase and cancel each other; channel {} is used alone"
"""Warning for the channel that `cancelled` names: the end of a sentence about the sound."""


SAMPLE_RATE = 16_000
"""Samples per second of the encoder's input."""

MAX_SECONDS = 1800.0
"""Longest file read unless the caller says otherwise: half an hour, 115 MB of float32 at 16 kHz."""

MAX_STREAM_BYTES = 1 << 28
"""Most bytes read of a source whose length is not known before (pipes, devices): 256 MiB."""

RATES = (100, 1_000_000)
"""Sample rates that a file may have."""

AudioSource = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO
"""A path, the bytes of a file, or an open binary file."""


@dataclass(frozen=True)
class AudioInfo:
    """The header of a sound file, read without decoding anything."""

    sample_rate: int
    samples: int
    """Samples per channel."""
    channels: int
    format: str
    """Container and coding as libsndfile names them, such as "WAV PCM_16", or as FFmpeg does, such as "mov aac"."""

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate


def read_audio(
    source: AudioSource,
    sample_rate: int = SAMPLE_RATE,
    *,
    max_seconds: float | None = MAX_SECONDS,
    channel: int | Literal["mix"] = "mix",
    name: str | None = None,
) -> Tensor:
    """Read a recording as mono `[S]` float32 at `sample_rate` samples per second: WAV, FLAC, OGG, MP3, AIFF, AU, CAF, W64 or
    NIST, and with PyAV the sound of M4A, MP4, WebM, Matroska, AAC, WMA or AMR. Of several joined in one file all are heard.
    UserError: missing, a folder, empty, not a sound file, truncated, without samples (silence passes), too long, a stream
    without end, more than two channels and none chosen, NaN or infinity, a rate that no sound has.

    Args:
        max_seconds: longest that is read, by the header before anything is decoded; None for any length.
        channel: number of one, from 0; "mix" averages one or two, or takes the louder, with a warning, where they cancel.
        name: the source's in messages.

    SoundWarning: perhaps cut short, or channels that cancel each other.
    """
    name = name or _name(source)
    with opened(source, name) as recording:
        rate, promised, doubt = recording.rate, recording.samples, recording.doubt
        if not RATES[0] <= rate <= RATES[1]:
            raise UserError(f"{name} claims {rate} Hz; sound has {RATES[0]} to {RATES[1]} samples per second: convert it again")
        if max_seconds is not None and promised is not None and promised > max_seconds * rate:
            raise _too_long(name, promised / rate, max_seconds)
        if channel == "mix" and recording.channels > 2:
            raise UserError(
                f"{name} has {recording.channels} channels and only 1 or 2 are mixed: convert it to mono (of omni-infer ask, "
                f"--channel chooses one of 0 to {recording.channels - 1})"
            )
        if channel != "mix" and not 0 <= channel < recording.channels:
            raise UserError(f"{name} has no channel {channel}: it has {recording.channels}, counted from 0")
        audio, loudest = _decode(recording, name, max_seconds, channel, sample_rate)
        if loudest is not None:
            audio, _ = _decode(recording, name, max_seconds, loudest, sample_rate)
            doubt = f"{name}: its {ONE_CHANNEL.format(loudest)}"
    if len(audio) == 0:
        raise UserError(f"{name} holds no samples: record or convert it again")
    if doubt is not None:
        warn_about_sound(doubt)
    return audio


def audio_info(source: AudioSource, *, name: str | None = None) -> AudioInfo:
    """Read the header of a sound file, of the first where several were joined; one without a length is decoded. UserError:
    missing, a folder, empty, not a sound file, a stream without end, or truncated (as far as its size shows)."""
    name = name or _name(source)
    with opened(source, name, ends=False) as recording:
        samples = recording.samples
        if samples is None:
            samples = sum(len(block) * recording.rate // rate for rate, block in recording.blocks())
        return AudioInfo(recording.rate, samples, recording.channels, recording.format)


def read_part(source: AudioSource, start: int, stop: int, *, name: str | None = None) -> tuple[Tensor, int]:
    """Read samples `start` to `stop` of a recording as `[S, C]` float32, fewer where it ends before, and their rate. UserError:
    as of `audio_info`, or it is damaged there."""
    import torch

    name = name or _name(source)
    with opened(source, name, ends=False) as recording:
        return torch.from_numpy(recording.part(start, stop, name)), recording.rate


def read_stream(source: BinaryIO, name: str) -> bytearray:
    """Reads a pipe, device or socket that gives a sound file to its end. UserError: its first bytes are of none, or it does not
    end."""
    head = bytes(_read_up_to(source, HEAD))
    if head and container(head) is None:
        other = foreign(head)
        if other:
            raise _not_sound(name, other)
        raise UserError(
            f"{name} gives no sound file that can be read: give WAV, FLAC, OGG or MP3 (raw PCM needs its sample rate)"
        )
    data = _read_up_to(source, MAX_STREAM_BYTES + 1 - len(head), bytearray(head))
    if len(data) > MAX_STREAM_BYTES:
        raise UserError(
            f"{name} continues after {MAX_STREAM_BYTES >> 20} MiB, the most that is read of a stream: write it to a file"
        )
    return data


def _read_up_to(source: BinaryIO, count: int, data: bytearray | None = None) -> bytearray:
    """Reads up to `count` further bytes and appends them to `data`; fewer only at the end."""
    data = bytearray() if data is None else data
    most = len(data) + count
    while len(data) < most and (piece := source.read(min(most - len(data), 1 << 20))):
        data += piece
    return data


def from_pcm16(data: bytes | bytearray, source_rate: int) -> Tensor:
    """Turn raw mono 16-bit little-endian PCM at `source_rate` into `[S]` float32 in [-1, 1) at 16 kHz. UserError: no data, or
    an odd number of bytes."""
    import numpy as np
    import torch

    if not data or len(data) % 2:
        raise UserError(
            f"{len(data)} bytes are not 16-bit PCM: it takes two bytes a sample and at least one sample "
            "(signed, little-endian, mono)"
        )
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768.0
    return resample(torch.from_numpy(samples), source_rate, SAMPLE_RATE, name="PCM on input")


# ------------------------------------------------------------------------------------ opening and decoding


def _name(source: AudioSource) -> str:
    """Name of the source in error messages."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return f"sound of {len(source)} bytes"
    return shorten(os.fspath(source) if isinstance(source, (str, os.PathLike)) else getattr(source, "name", "open file"))


def shorten(value: object) -> str:
    """Text of a value in one line of bounded length."""
    text = repr(value[:300] if isinstance(value, str) else value)
    return text if len(text) <= 200 else f"{text[:160]}...{text[-30:]}"


@contextmanager
def opened(source: AudioSource, name: str, *, ends: bool = True) -> Iterator[Recording]:
    """A context with a recording that is open; errors as of `read_audio`, which are found before anything is decoded."""
    if isinstance(source, (str, os.PathLike)):
        try:
            mode = os.stat(source).st_mode
            if stat.S_ISDIR(mode):
                raise UserError(f"{name} is a folder: name one sound file in it")
            file: Any = open(source, "rb", buffering=0)  # noqa: SIM115
        except UserError:
            raise
        except OSError as error:
            refuse_remote(source, "sound file")
            raise UserError(
                f"{name}: {error.strerror or error}: check the path of the sound file, and that it may be read"
            ) from error
        except ValueError as error:  # a zero byte, or half of a surrogate pair
            raise UserError(f"{name}: no file can have this name: check the path of the sound file") from error
        with file:
            yield _checked(file if stat.S_ISREG(mode) else io.BytesIO(read_stream(file, name)), name, ends)
        return
    file = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
    try:
        recording = _checked(file if getattr(file, "seekable", bool)() else io.BytesIO(read_stream(file, name)), name, ends)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}: check that it is open and may be read") from error
    yield recording


def _checked(file: BinaryIO, name: str, ends: bool) -> Recording:
    """Opens a file at its position; refuses one that is empty, or known by its first bytes to be something else."""
    start = file.tell()
    head = bytes(_read_up_to(file, HEAD))
    if not head and start:
        raise UserError(f"{name} has been read to its end: go back with seek(0)")
    if not head:
        raise UserError(f"{name} is empty (0 bytes): record or download it again")
    if (other := foreign(head)) is not None:
        raise _not_sound(name, other)
    if start:
        file = io.BytesIO(head + file.read())
    file.seek(0)
    return open_recording(file, name, ends=ends)


def _decode(
    recording: Recording, name: str, limit: float | None, channel: int | Literal["mix"], sample_rate: int
) -> tuple[Tensor, int | None]:
    """Decodes the chosen channel [S] float32 at `sample_rate`, block by block; also returns the channel to take instead where
    mixed channels cancel each other."""
    import numpy as np
    import torch

    mixed, energies, before = 0.0, np.zeros(2), 0.0  # seconds of earlier rates

    def mono(blocks: Iterator[Block], rate: int) -> Iterator[Tensor]:
        nonlocal mixed, energies, before
        total = 0
        for _, block in blocks:
            alone = 0 if block.shape[1] == 1 else channel
            samples = (block[:, 0] + block[:, 1]) / 2 if alone == "mix" else np.ascontiguousarray(block[:, alone])
            if not (finite := np.isfinite(samples)).all():
                at = before + (total + int(finite.argmin())) / rate
                raise UserError(f"{name} holds NaN or infinity at {at:.3f} s: fix it, or write it again as 16-bit PCM")
            total += len(block)
            if limit is not None and before + total / rate > limit:
                raise _too_long(name, before + total / rate, limit)
            if alone == "mix":
                mixed += float(np.square(samples).sum())
                energies += np.square(block).sum(axis=0)
            yield torch.from_numpy(samples)
        before += total / rate

    pieces = [
        _resampled(mono(blocks, rate), rate, sample_rate, name) for rate, blocks in groupby(recording.blocks(), itemgetter(0))
    ]
    audio = pieces[0] if len(pieces) == 1 else torch.cat([torch.zeros(0), *pieces])
    return audio, cancelled(mixed, energies.tolist())


def _resampled(pieces: Iterator[Tensor], rate: int, sample_rate: int, name: str) -> Tensor:
    """Joins pieces [S] at another rate, without holding those before and after it."""
    import torch

    first, second = next(pieces), next(pieces, None)
    if second is None:
        return resample(first, rate, sample_rate, name=name)
    stream = StreamResampler(rate, sample_rate, name=name)
    return torch.cat([*(stream.push(piece) for piece in chain((first, second), pieces)), stream.finish()])


def _not_sound(name: str, other: str) -> UserError:
    way = "" if "git lfs" in other else ": convert it to WAV, FLAC, OGG or MP3"
    return UserError(f"{name} is not a sound file but {other}{way}")


def _too_long(name: str, seconds: float, limit: float) -> UserError:
    return UserError(f"{name} lasts {seconds:.1f} s or more, and the limit is {limit:g} s: cut it into pieces")
