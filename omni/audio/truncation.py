"""Detects truncated sound files and impossible bit depths, which libsndfile plays without an error.

A file that is certainly cut is refused: a chunk of samples that is shorter than its header says (WAV, RF64, W64, AIFF, AU, CAF,
NIST), an OGG that ends inside a page, and (in `omni.audio.io`) fewer samples than a FLAC or MP3 promises. One that may be cut
gives a `SoundWarning`: an OGG without its end mark, an MP3 that ends inside a frame.
"""

from __future__ import annotations

import os
import re
import struct
from typing import BinaryIO, NamedTuple

from omni.audio import mp3
from omni.errors import UserError

_STREAMED = 0x7FFF0000  # a size from here up is what programs write into a pipe, where they cannot know it
_PAGE = 27 + 255 + 255 * 255  # the longest page of an OGG
_BITS = (8, 12, 16, 20, 24, 32, 64)  # per sample of a WAV; libsndfile rounds any other number up to whole bytes


class Extent(NamedTuple):
    """Bytes of samples that a header promises, and bytes that the file has."""

    promised: int
    held: int

    @property
    def cut(self) -> bool:
        return self.held < self.promised


def extent(file: BinaryIO, kind: str | None, name: str) -> Extent | None:
    """The extent of a file whose position is at its start; None where the header does not say. The position changes.

    UserError: a bit depth that no WAV has.
    """
    start = file.tell()
    size = file.seek(0, os.SEEK_END) - start
    file.seek(start)
    if kind == "AU":
        _, offset, promised = struct.unpack("<4sII" if file.read(1) == b"d" else ">4sII", _again(file, start, 12))
        return None if promised >= _STREAMED else Extent(promised, max(0, size - offset))
    if kind == "NIST":
        return _nist(_again(file, start, 1024), size)
    if kind in ("WAV", "AIFF", "CAF", "W64"):
        return _chunks(file, start, size, name)
    return None


def _again(file: BinaryIO, start: int, count: int) -> bytes:
    """Reads `count` bytes from `start`, filled up with zeros where the file is shorter."""
    file.seek(start)
    return file.read(count).ljust(count, b"\0")


def _nist(head: bytes, size: int) -> Extent | None:
    fields = dict(re.findall(rb"(sample_count|channel_count|sample_n_bytes) -i (\d{1,12})", head))
    if b"sample_count" not in fields or not (length := re.match(rb"NIST_1A\s+(\d{1,6})\s", head)):
        return None
    width = int(fields.get(b"sample_n_bytes", 2)) * int(fields.get(b"channel_count", 1))
    return Extent(int(fields[b"sample_count"]) * width, max(0, size - int(length[1])))


def _chunks(file: BinaryIO, start: int, size: int, source: str) -> Extent | None:
    """Walks the chunks of a file up to the chunk of samples."""
    mark = _again(file, start, 4)
    form, at, own, align = {  # a chunk's header; offset of the first; whether lengths include it; their alignment
        b"RIFF": ("<4sI", 12, 0, 2),
        b"RF64": ("<4sI", 12, 0, 2),
        b"RIFX": (">4sI", 12, 0, 2),
        b"FORM": (">4sI", 12, 0, 2),
        b"caff": (">4sq", 8, 0, 1),
        b"riff": ("<4s12xQ", 40, 24, 8),
    }.get(mark, ("", 0, 0, 0))
    width, long = struct.calcsize(form), 0
    while form and at + width <= size:
        file.seek(start + at)
        name, length = struct.unpack(form, file.read(width))
        at += width
        if name == b"ds64":  # of RF64: sizes of 64 bits
            long = struct.unpack("<8xQ", file.read(16).ljust(16, b"\0"))[0]
        if name == b"fmt " and at + 16 <= size:
            code, bits, wide = struct.unpack(form[0] + "H12xH8xH", file.read(26).ljust(26, b"\0"))
            if (wide if code == 0xFFFE else code) in (1, 3) and bits not in _BITS:  # PCM or floating point
                raise UserError(f"{source} claims {bits} bits per sample; WAV has 8, 16, 24, 32 or 64: convert it again")
        if name in (b"data", b"SSND"):
            if mark == b"RF64" and length == 0xFFFFFFFF:
                length = long
            unknown = length < 0 or length >= (1 << 62 if width > 8 or mark == b"RF64" else _STREAMED)
            return None if unknown else Extent(length - own, size - at)
        if length < own:
            return None
        length -= own
        at += length + -length % align
    return None


def check_end(file: BinaryIO, kind: str | None, name: str) -> str | None:
    """Checks the end of an OGG or MP3, which have no chunks; returns a sentence where it may be cut.

    UserError: it is cut, or what should be MP3 has no two frames in a row. The file's position stays.
    """
    start, doubt = file.tell(), None
    if kind == "OGG":
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - 2 * _PAGE))
        tail = file.read(2 * _PAGE)
        at = tail.rfind(b"OggS\0")
        page = tail[at:] if at >= 0 else b""
        segments = page[27 : 27 + page[26]] if len(page) > 26 else b""
        if len(page) < 27 or len(page) < 27 + page[26] + sum(segments):
            raise UserError(f"{name} is truncated: it ends inside a page: copy or download it again, or convert what is left")
        if not page[5] & 4:
            doubt = f"{name} may be cut short: its last page is not marked as the end"
    elif kind == "MP3":
        data = file.read()
        first = mp3.first_frame(data)
        if first is None:
            raise UserError(f"{name} is not a sound file: it starts like MP3, but no two frames follow each other")
        if mp3.ends_inside(data, first):
            doubt = f"{name} may be cut short: its last frame is not whole"
    file.seek(start)
    return doubt
