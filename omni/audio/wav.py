"""Writes sound: 16-bit PCM bytes, and sound files that appear under their name only when they are complete. Reads the header of
a WAV file whose bytes are still coming.

A file is written beside its place (`.NAME.part-…`) and renamed when it is closed, so a reader never sees half of one. Format:
RIFF WAVE, a `fmt ` and a `data` chunk, little-endian (Microsoft and IBM, Multimedia Programming Interface 1.0, 1991).

S samples, C channels.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from omni.errors import UserError
from omni.files import replacing

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FORMATS = {".wav": "WAV", ".flac": "FLAC", ".ogg": "OGG", ".mp3": "MP3"}
"""Formats that `write_audio` writes, by the file's suffix."""

UNKNOWN = 0xFFFFFFFF
"""The size in a header where none is known yet: players then read to the end."""
_BLOCK = 1 << 16  # samples that are encoded at a time
_LIMIT = 0xFFFFFF00  # bytes of data that a RIFF header can count


def pcm16(audio: Tensor) -> bytes:
    """Raw 16-bit little-endian PCM of `[S]` floats in [-1, 1]; louder is clipped, full scale is 32768. Reading divides by
    32768, so what was read as 16 bits is written back bit for bit. UserError: NaN, infinity, or more than one dimension."""
    import numpy as np
    import torch

    if audio.ndim != 1:
        raise UserError(f"sound to write has shape {list(audio.shape)}: give one channel, [samples]")
    audio = audio.detach().to("cpu", torch.float32)
    if not bool(np.isfinite(audio.numpy()).all()):
        raise UserError("sound to write holds NaN or infinity: look at what produced it")
    levels = audio.mul(32768.0).round().clamp(-32768, 32767)
    return levels.to(torch.int16).numpy().astype("<i2").tobytes()


def write_wav(path: str | os.PathLike[str], audio: Tensor, sample_rate: int) -> Path:
    """Write mono `[S]` as a WAV file and return its path. Errors: those of `WavWriter`."""
    with WavWriter(path, sample_rate) as writer:
        writer.append(audio)
    return writer.path


def write_audio(path: str | os.PathLike[str], audio: Tensor, sample_rate: int) -> Path:
    """Write mono `[S]` as WAV, FLAC (both 16 bit), OGG or MP3, by the path's suffix, and return the path. UserError: another
    suffix, or those of `WavWriter`."""
    import numpy as np
    import soundfile

    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{os.fspath(path)!r}: the suffix says how sound is written; use {', '.join(FORMATS)}")
    if suffix == ".wav":
        return write_wav(path, audio, sample_rate)
    data = np.frombuffer(pcm16(audio), "<i2")
    try:
        with replacing(path) as part, soundfile.SoundFile(part, "w", sample_rate, 1, format=FORMATS[suffix]) as file:
            for start in range(0, len(data), _BLOCK):
                file.write(data[start : start + _BLOCK])
    except UserError:
        raise
    except (OSError, soundfile.SoundFileError, ValueError) as error:  # also a rate that the format does not have
        raise _refused(path, error) from error
    return Path(path)


class WavWriter(AbstractContextManager["WavWriter"]):
    """A mono WAV file that grows chunk by chunk.

        with WavWriter("answer.wav", 24000) as writer:
            for chunk in stream:
                writer.append(chunk)

    The file has its name after `close()` (the end of the block); an exception inside the block, or `abort()`, leaves nothing.
    UserError: a place that cannot be written (no such folder, a folder or device of that name, no rights), no space left, NaN
    or infinity in the sound, more than a WAV file can count (4 GiB)."""

    def __init__(self, path: str | os.PathLike[str], sample_rate: int) -> None:
        if not 1 <= sample_rate < 1 << 30:
            raise UserError(f"{os.fspath(path)!r}: {sample_rate} Hz is not a sample rate")
        self.path = Path(path)
        self.sample_rate = sample_rate
        self.samples = 0
        self._bytes, self._closing = 0, ExitStack()
        with self._refusing():
            self._file: BinaryIO = self._closing.enter_context(self._closing.enter_context(replacing(path)).open("wb"))
            self._file.write(wav_header(sample_rate))

    @property
    def seconds(self) -> float:
        """Seconds of sound written so far."""
        return self.samples / self.sample_rate

    def append(self, audio: Tensor) -> None:
        """Add `[S]` floats in [-1, 1] (any S, zero included); ValueError after `close` or `abort`."""
        data = pcm16(audio)
        if self._bytes + len(data) > _LIMIT:
            raise UserError(f"{str(self.path)!r}: a WAV file holds at most 4 GiB: start another after {self.seconds:.0f} s")
        with self._refusing():
            self._file.write(data)
        self._bytes += len(data)
        self.samples += audio.shape[0]

    def close(self) -> Path:
        """Complete the header, give the file its name and return it; a second call changes nothing."""
        if not self._file.closed:
            with self._refusing():
                self._file.seek(0)
                self._file.write(wav_header(self.sample_rate, self._bytes))
                self._closing.close()
        return self.path

    def abort(self) -> None:
        """Discard what was written; a file that was at the path before stays."""
        with suppress(OSError), self._closing:  # which leaves nothing where the block fails
            raise OSError

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Discards the file where the block fails."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise _refused(self.path, error) from error


def _refused(path: str | os.PathLike[str], error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or re.sub(r"^Error opening '.*?': ", "", str(error))
    return UserError(
        f"cannot write {os.fspath(path)!r}: {reason}: check that its folder exists, may be written and has space left"
    )


def wav_header(sample_rate: int, data_bytes: int = UNKNOWN) -> bytes:
    """The header, all 44 bytes before mono samples of 16 bits."""
    riff = min(36 + data_bytes, UNKNOWN)
    return struct.pack(
        "<4sI8sIHHIIHH4sI", b"RIFF", riff, b"WAVEfmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16, b"data", data_bytes
    )


_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TYPES = {(_PCM, 16): "<i2", (_FLOAT, 32): "<f4"}
_ENDLESS = 0x7FFFF000  # sizes from here on, and 0, say nothing


@dataclass(frozen=True)
class SampleForm:
    """Where the samples are in the bytes.

    Attributes:
        rate: samples per second.
        channels: C, one after another in each frame.
        type: of a sample, for NumPy.
        start, end: bytes at which the samples begin, and end (None for the end of all).
    """

    rate: int
    channels: int = 1
    type: str = "<i2"
    start: int = 0
    end: int | None = None

    @property
    def frame(self) -> int:
        """Bytes of a sample of all channels."""
        return self.channels * int(self.type[-1])

    def samples(self, data: bytes) -> np.ndarray:
        """Samples [C, S] of whole frames, [S] of one channel."""
        import numpy as np

        values = np.frombuffer(data, self.type)
        return values if self.channels == 1 else values.reshape(-1, self.channels).T


def wav_form(head: bytes) -> SampleForm | None:
    """The form of a WAV file that begins with `head`; None where its samples are no 16-bit integers or 32-bit floats, or begin
    later."""
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        return None
    offset, form = 12, None
    while offset + 8 <= len(head):
        name, size = struct.unpack_from("<4sI", head, offset)
        offset += 8
        if name == b"data":
            end = None if size == 0 or size >= _ENDLESS else offset + size
            return form and SampleForm(*form, offset, end)
        if name == b"fmt " and size >= 16 and offset + min(size, 26) <= len(head):
            tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", head, offset)
            if tag == _EXTENSIBLE and size >= 26:
                (tag,) = struct.unpack_from("<H", head, offset + 24)
            sample_type = _TYPES.get((tag, bits))
            form = (rate, channels, sample_type) if sample_type is not None and channels and rate else None
        offset += size + size % 2
    return None
