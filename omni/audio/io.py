"""Reads sound files, bytes and raw PCM as mono tensors `[S]` float32 at the rate the caller asks for.

Everything a person may hand over by mistake (a folder, a text file, half a download, three hours, eight
channels, NaN, `/dev/zero`) is refused here with one line that names the source, the value and the way out, so
that no caller has to check again; and before memory is taken for it. Sound that is accepted but may not be what was
meant gives a `SoundWarning`. WAV files are written by `omni.audio.wav`, whose names are exported here too.

S samples, C channels.
"""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Literal

from omni.audio.level import cancelled, heard_alone
from omni.audio.mp3 import quiet_decoder
from omni.audio.resample import resample
from omni.audio.sniff import HEAD, container, foreign
from omni.audio.truncation import check_end, extent
from omni.audio.wav import WavWriter, pcm16, write_wav
from omni.errors import UserError, warn_about_sound
from omni.remote import refuse_remote

if TYPE_CHECKING:
    import numpy as np
    import soundfile
    from torch import Tensor

__all__ = [
    "MAX_SECONDS",
    "MAX_STREAM_BYTES",
    "SAMPLE_RATE",
    "AudioInfo",
    "AudioSource",
    "WavWriter",
    "audio_info",
    "from_pcm16",
    "pcm16",
    "read_audio",
    "read_stream",
    "resample",
    "write_wav",
]

SAMPLE_RATE = 16_000
"""Samples per second of the encoder's input."""

MAX_SECONDS = 1800.0
"""Longest file read unless the caller says otherwise: half an hour, 115 MB of float32 at 16 kHz."""

MAX_STREAM_BYTES = 1 << 28
"""Most bytes read of a source whose length is not known before (pipes, devices), and of an OGG or MP3: 256 MiB."""

RATES = (100, 1_000_000)
"""Sample rates that a file may have."""

AudioSource = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO
"""A path, the bytes of a file, or an open binary file."""

_FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "OGG", "MP3", "NIST")
"""libsndfile guesses some twenty further formats, from as little as four zero bytes; whether such a file is whole cannot be
checked."""

_MOST = 1800 * 96_000  # samples a channel, whatever the rate: 691 MB of float32
_BLOCK = 1 << 18  # samples decoded at a time, so that no header can ask for memory that the data does not fill


@dataclass(frozen=True)
class AudioInfo:
    """The header of a sound file, read without decoding anything."""

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
    name: str | None = None,
) -> Tensor:
    """Read WAV, FLAC, OGG, MP3, AIFF, AU, CAF, W64 or NIST as mono `[S]` float32 at `sample_rate` samples per second.

    `channel="mix"` averages one or two channels (and takes the louder, with a warning, where they cancel each
    other); a number takes that channel (from 0) of any file. `max_seconds=None` lifts the limits on length, which
    are otherwise checked against the header before anything is decoded. `name` is what messages call the source.
    Silence is sound and passes. UserError: missing, a folder, empty, not a sound file, truncated, without samples,
    too long, a stream without end, more than two channels and none chosen, NaN or infinity, a rate or bit depth
    that no sound has. SoundWarning: perhaps cut short, or channels that cancel each other."""
    import numpy as np
    import torch

    name = name or _name(source)
    sound, doubt = _open(source, name, max_seconds is not None)
    with sound as file:
        rate, promised = file.samplerate, file.frames
        if not RATES[0] <= rate <= RATES[1]:
            raise UserError(f"{name} claims {rate} Hz; sound has {RATES[0]} to {RATES[1]} samples per second: convert it again")
        most = None if max_seconds is None else int(min(max_seconds * rate, _MOST))
        if most is not None and promised > most:
            raise _too_long(name, promised / rate, most / rate)
        if channel == "mix" and file.channels > 2:
            raise UserError(
                f"{name} has {file.channels} channels and only 1 or 2 are mixed: choose one with "
                f"channel=0 to channel={file.channels - 1}"
            )
        if channel != "mix" and not 0 <= channel < file.channels:
            raise UserError(f"{name} has no channel {channel}: it has {file.channels}, counted from 0")
        samples, loudest = _decode(file, name, most, channel)
        if loudest is not None:
            file.seek(0)
            samples, _ = _decode(file, name, most, loudest)
            doubt = f"{name}: its {heard_alone(loudest)}"
    if len(samples) + rate // 10 < promised:  # a tenth of a second: MP3 headers count their padding loosely
        raise _truncated(name, len(samples) / rate, promised / rate)
    if len(samples) == 0:
        raise UserError(f"{name} holds no samples: record or convert it again")
    finite = np.isfinite(samples)
    if not finite.all():
        raise UserError(
            f"{name} holds NaN or infinity at {int(finite.argmin()) / rate:.3f} s: fix it, or write it again as 16-bit PCM"
        )
    if doubt is not None:
        warn_about_sound(doubt)
    return resample(torch.from_numpy(samples), rate, sample_rate, name=name)


def audio_info(source: AudioSource, *, name: str | None = None) -> AudioInfo:
    """Read the header of a sound file. UserError: missing, a folder, empty, not a sound file, a stream without end, or
    truncated (as far as its size shows)."""
    name = name or _name(source)
    sound, _ = _open(source, name, bounded=False, ends=False)
    with sound as file:
        return AudioInfo(file.samplerate, file.frames, file.channels, f"{file.format} {file.subtype}")


def read_stream(source: BinaryIO, name: str) -> bytearray:
    """Reads a pipe, device or socket that gives a sound file to its end. UserError: its first bytes are of none, or it does not
    end."""
    head = bytes(_some(source, HEAD))
    if head and container(head) is None:
        kind = foreign(head)
        if kind:
            raise _not_sound(name, kind)
        raise UserError(
            f"{name} gives no sound file that can be read: give WAV, FLAC, OGG or MP3 (raw PCM needs its sample rate)"
        )
    data = _some(source, MAX_STREAM_BYTES + 1 - len(head), bytearray(head))
    if len(data) > MAX_STREAM_BYTES:
        raise UserError(
            f"{name} continues after {MAX_STREAM_BYTES >> 20} MiB, the most that is read of a stream: write it to a file"
        )
    return data


def _some(source: BinaryIO, count: int, data: bytearray | None = None) -> bytearray:
    """Reads up to `count` further bytes and appends them to `data`; fewer only at the end."""
    data = bytearray() if data is None else data
    most = len(data) + count
    while len(data) < most and (piece := source.read(min(most - len(data), 1 << 20))):
        if not isinstance(piece, bytes):
            raise UserError("the sound file is open as text: open it with mode 'rb'")
        data += piece
    return data


def from_pcm16(data: bytes | bytearray, source_rate: int, sample_rate: int = SAMPLE_RATE) -> Tensor:
    """Turn raw mono 16-bit little-endian PCM at `source_rate` into `[S]` float32 in [-1, 1) at `sample_rate`.

    UserError: no data, or an odd number of bytes.
    """
    import numpy as np
    import torch

    if not data or len(data) % 2:
        raise UserError(
            f"{len(data)} bytes are not 16-bit PCM: it takes two bytes a sample and at least one sample "
            "(signed, little-endian, mono)"
        )
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32768.0
    return resample(torch.from_numpy(samples), source_rate, sample_rate, name="PCM on input")


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


def _open(source: AudioSource, name: str, bounded: bool, ends: bool = True) -> tuple[soundfile.SoundFile, str | None]:
    """Opens a source for decoding, after checks that libsndfile does not make (`ends`: also those that read to the end).

    The second value describes what may be wrong with the file although it is accepted, None for nothing.
    """
    if isinstance(source, (str, os.PathLike)):
        try:
            mode = os.stat(source).st_mode
            if stat.S_ISDIR(mode):
                raise UserError(f"{name} is a folder: name one sound file in it")
            with open(source, "rb", buffering=HEAD) as file:
                if stat.S_ISREG(mode):
                    return _checked(file, os.fsencode(source), name, bounded, ends)
                source = read_stream(file, name)
        except OSError as error:
            if isinstance(source, (str, os.PathLike)):
                refuse_remote(source, "sound file")
            raise UserError(
                f"{name}: {error.strerror or error}: check the path of the sound file, and that it may be read"
            ) from error
        except UserError:
            raise
        except ValueError as error:  # a zero byte, or half of a surrogate pair
            raise UserError(f"{name}: no file can have this name: check the path of the sound file") from error
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    try:
        if not getattr(source, "seekable", bool)():
            source = io.BytesIO(read_stream(source, name))
        return _checked(source, source, name, bounded, ends)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}: check that it is open and may be read") from error
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is open as text: open it with mode 'rb'") from error
    except ValueError as error:  # closed
        raise UserError(f"{name} cannot be read ({error}): open it again") from error


def _checked(
    file: BinaryIO, place: bytes | BinaryIO, name: str, bounded: bool, ends: bool
) -> tuple[soundfile.SoundFile, str | None]:
    """Refuses a file that is empty, no sound, cut, or too large to be checked; then opens it at `place`."""
    start = file.tell()
    head = bytes(_some(file, HEAD))
    if not head and start:
        raise UserError(f"{name} has been read to its end: go back with seek(0)")
    if not head:
        raise UserError(f"{name} is empty (0 bytes): record or download it again")
    if (other := foreign(head)) is not None:
        raise _not_sound(name, other)
    kind = container(head)
    file.seek(start)
    there = extent(file, kind, name)
    if bounded and kind in ("OGG", "MP3") and (size := file.seek(0, os.SEEK_END) - start) > MAX_STREAM_BYTES:
        raise UserError(f"{name} takes {size >> 20} MiB and the limit of {kind} is {MAX_STREAM_BYTES >> 20} MiB: cut it")
    file.seek(start)
    doubt = check_end(file, kind, name) if ends else None
    try:
        sound = _sound_file(place, name, kind)
    except UserError:
        if there is not None and there.cut:
            raise _truncated(name, *there[::-1], unit="bytes") from None
        raise
    if sound.format not in _FORMATS:
        what = f"{sound.format} {sound.subtype}"
        sound.close()
        raise UserError(f"{name} is not a sound file that can be read (at most {what}): convert it to WAV, FLAC, OGG or MP3")
    if there is not None and there.cut:
        found = sound.frames / sound.samplerate
        sound.close()
        if not found:
            raise _truncated(name, *there[::-1], unit="bytes")
        raise _truncated(name, found, found * there.promised / there.held)
    return sound, doubt


def _sound_file(file: bytes | BinaryIO, name: str, kind: str | None) -> soundfile.SoundFile:
    import soundfile

    try:
        with quiet_decoder(kind or "MP3"):  # which libsndfile may take it for
            return soundfile.SoundFile(file)
    except soundfile.SoundFileError as error:
        raise UserError(
            f"{name} is not a sound file that can be read, or its beginning is damaged: convert it to WAV, FLAC, OGG or MP3"
        ) from error
    except TypeError as error:  # what soundfile raises for a name that ends in .raw
        raise UserError(f"{name} has no header: give raw PCM with its sample rate instead, or convert it to WAV") from error


def _decode(
    file: soundfile.SoundFile, name: str, most: int | None, channel: int | Literal["mix"]
) -> tuple[np.ndarray, int | None]:
    """Decodes all samples `[S]` float32 of the chosen channel, block by block; also returns the channel to take instead where
    mixed channels cancel each other."""
    import numpy as np
    import soundfile

    blocks: list[np.ndarray] = [np.zeros(0, np.float32)]
    total, mixed, energies = 0, 0.0, np.zeros(file.channels)
    with quiet_decoder(file.format):
        while True:
            try:
                block = file.read(max(1, _BLOCK // file.channels), dtype="float32", always_2d=True)  # [S, C]
            except soundfile.SoundFileError as error:
                raise UserError(
                    f"{name} is damaged or cut short after {file.tell() / file.samplerate:.2f} s: download or convert it again"
                ) from error
            if not len(block):
                break
            total += len(block)
            if most is not None and total > most:
                raise _too_long(name, total / file.samplerate, most / file.samplerate)
            blocks.append(block.mean(axis=1) if channel == "mix" else block[:, channel].copy())
            if channel == "mix" and file.channels > 1:
                mixed += float(np.square(blocks[-1]).sum())
                energies += np.square(block).sum(axis=0)
    return np.concatenate(blocks), cancelled(mixed, energies.tolist())


def _truncated(name: str, found: float, promised: float, unit: str = "s") -> UserError:
    form = ".2f" if unit == "s" else ".0f"
    return UserError(
        f"{name} is truncated: its header promises {promised:{form}} {unit} and {found:{form}} {unit} are there: "
        "copy or download it again, or convert what is left"
    )


def _not_sound(name: str, kind: str) -> UserError:
    return UserError(f"{name} is not a sound file but {kind}: convert it to WAV, FLAC, OGG or MP3")


def _too_long(name: str, seconds: float, limit: float) -> UserError:
    return UserError(f"{name} lasts {seconds:.1f} s or more, and the limit is {limit:g} s: cut it into pieces")
