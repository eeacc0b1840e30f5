"""Parses frame headers of MPEG audio (ISO/IEC 11172-3 and 13818-3, layers I to III): is data MP3, and does it end inside a
frame? Decoding is libsndfile's.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_MPEG1 = {  # kilobits per second, by layer
    1: (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    2: (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    3: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
}
_LOW = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_MPEG2 = {1: (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256), 2: _LOW, 3: _LOW}  # and 2.5
_RATES = (44100, 48000, 32000)
_CHATTER = re.compile(  # what libmpg123 writes, some of it after an empty line
    rb"^\n?(?:\[\S*libmpg123/\S+\] (?:error|warning): |mpg123 [Pp]rogrammer"
    rb"|Note: (?:Illegal Audio-MPEG-Header|Trying to resync|Hit end of \(available\) data|Skipped \d+ bytes in input"
    rb"|missing -?\d+ bytes in bit reservoir|Junk at the beginning|Looks like a RIFF header|Could be a BMP album art"
    rb"|Xing|Info: |broken frame|Cut frame|free format frame)"
    rb"|Warning: (?:Xing stream size|Encountered more data after|Big change|Real sample count)).*\n?",
    re.MULTILINE,
)
_LOCK = threading.RLock()
_JUNK = 1 << 16  # bytes behind tags in which the first frame is looked for


class Frame(NamedTuple):
    """Length of a frame in bytes, and the fields that all frames of a stream share: version, layer and sample rate."""

    length: int
    stream: tuple[int, int, int]


def frame(data: bytes, at: int) -> Frame | None:
    """The frame that starts at `at`; None where there is no header (free format, which nobody writes, included)."""
    if len(data) < at + 4 or data[at] != 0xFF or data[at + 1] & 0xE0 != 0xE0:
        return None
    version, layer = data[at + 1] >> 3 & 3, 4 - (data[at + 1] >> 1 & 3)  # version 3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5
    bitrate, rate, padding = data[at + 2] >> 4, data[at + 2] >> 2 & 3, data[at + 2] >> 1 & 1
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return None
    hertz = _RATES[rate] >> {3: 0, 2: 1, 0: 2}[version]
    bits = (_MPEG1 if version == 3 else _MPEG2)[layer][bitrate - 1] * 1000
    if layer == 1:
        return Frame((12 * bits // hertz + padding) * 4, (version, layer, hertz))
    samples = 576 if layer == 3 and version != 3 else 1152
    return Frame(samples // 8 * bits // hertz + padding, (version, layer, hertz))


def starts_frame(data: bytes, at: int = 0, *, whole: bool) -> bool:
    """Whether two frames of one stream follow each other from `at`; one is enough where the data is `whole` and ends with
    it (or with an ID3v1 tag behind it)."""
    first = frame(data, at)
    if first is None:
        return False
    behind = at + first.length
    second = frame(data, behind)
    if second is None:
        return whole and (behind == len(data) or data[behind : behind + 3] == b"TAG")
    return second.stream == first.stream


def first_frame(data: bytes) -> int | None:
    """Offset of the first of two frames in a row, behind ID3v2 tags and what follows them; None if there are none."""
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) >= at + 10:
        size = data[at + 6] << 21 | data[at + 7] << 14 | data[at + 8] << 7 | data[at + 9]  # seven bits a byte
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    last = min(len(data), at + (_JUNK if at else 1))
    while at < last:
        if starts_frame(data, at, whole=True):
            return at
        at = data.find(b"\xff", at + 1, last)
        if at < 0:
            return None
    return None


def ends_inside(data: bytes, at: int) -> bool:
    """Whether the last of the frames from `at` is cut. Bytes that are no frame (tags, damage) end the walk."""
    while found := frame(data, at):
        at += found.length
    return at > len(data)


@contextmanager
def quiet_decoder(kind: str | None) -> Iterator[None]:
    """Suppresses the messages that libmpg123, libsndfile's MP3 decoder, writes to standard error; other kinds than `MP3` are
    left alone.

    It bypasses Python, so the file descriptor is redirected meanwhile; what others write is passed on afterwards.
    """
    if kind != "MP3":
        yield
        return
    with _LOCK, tempfile.TemporaryFile() as held:
        try:
            own = os.dup(2)
        except OSError:  # no standard error
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            os.write(2, _CHATTER.sub(b"", held.read()))
