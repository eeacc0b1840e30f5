"""Identifies data by its first bytes: a sound container that is read here, another known format, or neither.

Raw PCM has no header, so only marks of at least three bytes count, and MP3 and AAC, whose frames start with eleven
and twelve set bits (as UTF-16 text and quiet PCM do), must show two frames in a row.
"""

from __future__ import annotations

import codecs

from omni.audio import mp3

HEAD = 4096
"""Bytes that are examined: enough for two frames of MP3."""

_MARKS = {
    b"fLaC": "FLAC",
    b"OggS": "OGG",
    b"caff": "CAF",
    b".snd": "AU",
    b"dns.": "AU",
    b"NIST_1A": "NIST",
    bytes.fromhex("726966662e91cf11a5d628db04c10000"): "W64",
}
_FORMS = {b"RIFFWAVE": "WAV", b"RIFXWAVE": "WAV", b"RF64WAVE": "WAV", b"FORMAIFF": "AIFF", b"FORMAIFC": "AIFF"}

_FOREIGN = {
    b"\x1aE\xdf\xa3": "WebM or Matroska",
    bytes.fromhex("3026b2758e66cf11"): "WMA",
    b"#!AMR": "AMR",
    b"ADIF": "AAC",
    b"MThd": "MIDI, notes without sound",
    b"RIFF": "a RIFF file without WAVE",
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b\x08": "a gzip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"\x7fELF": "a program",
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
    """Sound container (`WAV`, `FLAC`, `OGG`, `MP3`, ...) whose data starts with `head`, or None."""
    if form := _FORMS.get(head[:4] + head[8:12]):
        return form
    if head[:3] == b"ID3" and head[3:4] in (b"\2", b"\3", b"\4"):
        return "MP3"
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    return "MP3" if mp3.starts_frame(head, whole=len(head) < HEAD) else None


def foreign(head: bytes) -> str | None:
    """Description, as part of a sentence, of data that starts with `head` and is known not to be sound that is read here."""
    if container(head):
        return None
    if head[4:8] == b"ftyp":
        return "MP4 or M4A"
    if _aac(head):
        return "AAC"
    for mark, name in _FOREIGN.items():
        if head.startswith(mark):
            return name
    text = _text(head)
    if text is None:
        return None
    start = text.lstrip("\ufeff" + _LAYOUT + " ").lower()
    if start.startswith("version https://git-lfs"):
        return "a pointer of Git LFS (git lfs pull fetches what it stands for)"
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


def _aac(head: bytes) -> bool:
    """Whether two frames of AAC in ADTS (ISO/IEC 13818-7, 6.2) follow each other."""
    if len(head) < 7 or head[0] != 0xFF or head[1] & 0xF6 != 0xF0:
        return False
    length = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
    return length >= 7 and head[length : length + 2] == head[:2] and head[length + 2 : length + 3] == head[2:3]
