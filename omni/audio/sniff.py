"""Identifies data by its first bytes: a sound container that is read here, another known format, or neither.

What may be raw PCM, which has no header, has to be told from the rest before a decoder is asked.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

_CHATTER = re.compile(  # what libmpg123 writes, some of it after an empty line
    rb"^\n?(?:\[\S*libmpg123/\S+\] (?:error|warning): |mpg123 [Pp]rogrammer"
    rb"|Note: (?:Illegal Audio-MPEG-Header|Trying to resync|Hit end of \(available\) data|Skipped \d+ bytes in input"
    rb"|missing -?\d+ bytes in bit reservoir|Junk at the beginning|Looks like a RIFF header|Could be a BMP album art"
    rb"|Xing|Info: |broken frame|Cut frame|free format frame)"
    rb"|Warning: (?:Xing stream size|Encountered more data after|Big change|Real sample count)).*\n?",
    re.MULTILINE,
)
_LOCK = threading.RLock()


@contextmanager
def quiet_decoder(sound_format: str | None) -> Iterator[None]:
    """Suppresses the messages that libmpg123, libsndfile's MP3 decoder, writes to standard error; other kinds than `MP3` and
    `MPEG` are left alone.

    It bypasses Python, so the file descriptor is redirected meanwhile; what others write is passed on afterwards.
    """
    if sound_format not in ("MP3", "MPEG"):
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


HEAD = 4096
"""Bytes that are examined: enough for two frames of MP3."""

SUFFIXES = (
    *(".flac", ".wav", ".ogg", ".mp3", ".opus", ".oga", ".m4a", ".mp4", ".webm", ".mka", ".aac", ".wma", ".amr"),
    *(".aif", ".aiff", ".au", ".caf", ".w64"),
)
"""Endings of names of recordings."""

_MARKS = {
    b"fLaC": "FLAC",
    b"OggS": "OGG",
    b"caff": "CAF",
    b".snd": "AU",
    b"dns.": "AU",
    b"NIST_1A": "NIST",
    bytes.fromhex("726966662e91cf11a5d628db04c10000"): "W64",
    **{b"ID3" + bytes([version]): "MP3" for version in (2, 3, 4)},
    b"\x1aE\xdf\xa3": "WEBM",
    bytes.fromhex("3026b2758e66cf11"): "WMA",
    b"#!AMR": "AMR",
}
_FORMS = {b"RIFFWAVE": "WAV", b"RIFXWAVE": "WAV", b"RF64WAVE": "WAV", b"FORMAIFF": "AIFF", b"FORMAIFC": "AIFF"}

_FOREIGN = {
    b"RIFF": "a RIFF file without WAVE",
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
}

_BOMS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_LAYOUT = "\t\n\v\f\r\x1b"


def container(head: bytes) -> str | None:
    """Sound container (`WAV`, `FLAC`, `OGG`, `MP3`, `MP4`, ...) whose data starts with `head`, or None."""
    name = marked(head)
    return name if name != "MPEG" else "MP3" if _is_mp3(head) else None


def marked(head: bytes) -> str | None:
    """As `container`, with `MPEG` for what starts as a frame of MP3 does and may be raw PCM, too."""
    if form := _FORMS.get(head[:4] + head[8:12]):
        return form
    if head[4:8] == b"ftyp":
        return "MP4"
    if name := next((name for mark, name in _MARKS.items() if head.startswith(mark)), None):
        return name
    if not b"\xff\xe0" <= head[:2] < b"\xff\xfe":  # frames of MP3 and AAC; \xfe and \xff: quiet PCM, UTF-16
        return None
    if head[1] & 0xF6 == 0xF0:
        return "AAC" if head.count(head[:3]) > 1 else None
    return "MPEG"


@lru_cache(8)
def _is_mp3(head: bytes) -> bool:
    import soundfile

    try:
        with quiet_decoder("MP3"), soundfile.SoundFile(io.BytesIO(head)) as sound:
            return bool(sound.format == "MP3")
    except soundfile.SoundFileError:
        return False


def foreign(head: bytes) -> str | None:
    """Description, as part of a sentence, of data that starts with `head` and is known not to be sound that is read here."""
    if marked(head):
        return None
    if name := next((name for mark, name in _FOREIGN.items() if head.startswith(mark)), None):
        return name
    text = _text(head)
    if text is None:
        return None
    start = text.lstrip("\ufeff" + _LAYOUT + " ").lower()
    if start.startswith("version https://git-lfs"):
        return "a pointer of Git LFS: `git lfs pull` there fetches what it stands for"
    if start.startswith(("<!doctype html", "<html")):
        return "HTML, a web page"
    if start.startswith("<?xml"):
        return "XML"
    return "JSON" if start.startswith(('{"', "[{", '["', "{\n", "[\n", "{}")) else "text"


def _text(head: bytes) -> str | None:
    """`head` decoded as text where all of it is printable, else None; UTF-16 also without its mark."""
    encoding = next((name for mark, name in _BOMS.items() if head.startswith(mark)), "utf-8")
    if encoding == "utf-8" and len(head) >= 4:
        if not any(head[1::2]) and all(head[::2]):
            encoding = "utf-16-le"
        elif not any(head[::2]) and all(head[1::2]):
            encoding = "utf-16-be"
    try:  # incremental: a character may be cut at the end
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeError:
        return None
    return text if text and all(c.isprintable() or c in _LAYOUT or c == "\ufeff" for c in text) else None
