"""Decodes recordings block by block: with libsndfile, or with FFmpeg (the package `av`) what libsndfile cannot read.

These two decide what a file is and where its samples are; only what may be raw PCM, which has no header, is told from the rest
by its first bytes. That samples are missing is found in libsndfile's log, since it plays such files without an error: a length
beyond the end of the file, an OGG that ends inside a page. Lengths that programs write where they cannot know one (0, or a
gigabyte and more) count as unknown. Files that were joined are heard part by part.

S samples, C channels.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

from omni.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import soundfile

FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC", "OGG", "MP3", "NIST")
"""Formats of libsndfile that are taken. It guesses some twenty further ones, from as little as four zero bytes."""

UNREADABLE = "is not a sound file that can be read, or it is damaged or cut short: convert it to WAV, FLAC, OGG or MP3"

FFMPEG = "mov,mp4,matroska,webm,aac,ogg,mp3,flac,wav,w64,caf,aiff,au,asf,amr,amrnb,amrwb,ac3,eac3,mpegts"
"""Demuxers that are tried. No playlists: they name further files."""

_JOINED = ("WAV", "AIFF", "AU", "CAF", "W64", "NIST", "FLAC", "OGG", "MP3")
_BLOCK = 1 << 18  # samples decoded at a time, so that no header can ask for memory that the data does not fill
_UNKNOWN = 10**9  # bytes: a length from here on is no length
_SIZES = re.compile(r"(?:data|SSND|Data Size|riff|Riff size) *: (\d+) \(should be (\d+)\)")
_TAGS = 512  # bytes behind an MP3 that may be tags

Block = tuple[int, "np.ndarray"]
"""A sample rate, and samples [S, C] float32."""


@dataclass(frozen=True)
class Recording:
    """A recording: its header, and its samples as blocks.

    Attributes:
        rate, channels: the highest, where several files were joined.
        samples: per channel, as promised; None where only decoding tells.
        format: container and coding, such as "WAV PCM_16".
        blocks: decodes from the start. UserError: the file is damaged, or has less than it promises.
        doubt: a possible fault of a recording that is accepted.
        sound: the file in libsndfile; None where it is read otherwise.
    """

    rate: int
    channels: int
    samples: int | None
    format: str
    blocks: Callable[[], Iterator[Block]]
    doubt: str | None = None
    sound: soundfile.SoundFile | None = None

    def part(self, start: int, stop: int, name: str) -> np.ndarray:
        """Samples [S, C] from `start` to `stop`, fewer at the end; what FFmpeg reads is decoded from the beginning."""
        import numpy as np
        import soundfile

        if self.sound is None or not self.sound.seekable():
            blocks = [np.zeros((0, self.channels), np.float32)]
            for _, block in _behind(start, self.blocks()):
                blocks.append(block[: stop - start - sum(map(len, blocks))])
                if len(blocks[-1]) < len(block):
                    break
            return np.concatenate(blocks)
        try:
            with quiet_decoder(self.sound.format):
                self.sound.seek(start)
                return self.sound.read(stop - start, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise _damaged(name, start / self.rate) from error


def open_recording(file: BinaryIO, name: str, *, ends: bool = True) -> Recording:
    """Open a recording whose file is at its start; it must stay open while `blocks` is used. UserError: neither of the two can
    read it, or it is truncated.

    Args:
        name: of the file in messages.
        ends: look also for what follows in the file (several recordings), which may read all of it.
    """
    head = file.read(HEAD)
    sound = _opened(file, head)
    container_name = "MP3" if sound is not None and sound.format == "MP3" else container(head)
    log = "" if sound is None else sound.extra_info
    if (
        ends
        and container_name in _JOINED
        and (container_name not in ("WAV", "AIFF") or sound is None or sound.format == "RAW" or "should be" in log)
    ):
        position = file.tell()  # libsndfile's too
        starts = _starts(file, head, container_name)
        if len(starts) > 1:
            return _joined(file, starts, name)
        file.seek(position)
    if sound is None and (container_name == "CAF" or head.startswith(b"RF64")):
        file.seek(0)
        data = file.read()
        if container_name == "WAV":  # of unknown length, which libsndfile knows in a RIFF only
            return open_recording(io.BytesIO(b"RIFF" + data[4:]), name, ends=False)
        at = data.find(b"data") + 12 if container_name == "CAF" else len(data)  # libsndfile says only that it is malformed
        if len(data) - at < (promised := int.from_bytes(data[at - 8 : at], "big", signed=True)) < _UNKNOWN:
            raise truncated(name, len(data) - at, promised, "bytes")
    if sound is None or sound.frames >= 1 << 60:  # a FLAC that does not say how many
        return by_ffmpeg(file, name)
    if ends and sound.format == "OGG" and ("Junk after the last page" in log or "ended unexpectedly" in log):
        raise UserError(f"{name} is truncated: it ends inside a page: copy or download it again, or convert what is left")
    samples, form = _promised(sound, head, log, name), f"{sound.format} {sound.subtype}"
    doubt = f"{name} may be cut short: its last page is not marked as the end" if "lacks an end-of-stream" in log else None
    return Recording(sound.samplerate, sound.channels, samples, form, lambda: _blocks(sound, file, samples, name), doubt, sound)


def _opened(file: BinaryIO, head: bytes) -> soundfile.SoundFile | None:
    """The file in libsndfile; None where that cannot read it. Samples whose length is given as 0 are opened as raw ones."""
    import soundfile

    file.seek(0)
    try:
        with quiet_decoder(marked(head) or "MPEG"):  # which libsndfile may take it for
            sound = soundfile.SoundFile(file.fileno() if isinstance(file, io.FileIO) else file, closefd=False)
        if not sound.frames and (sound.format == "AU" or " marker" in sound.extra_info) and (rest := file.read()):
            if not soundfile.check_format("RAW", sound.subtype):
                return None
            endian = sound.endian if sound.endian != "FILE" else "BIG" if sound.format in ("AIFF", "AU") else "LITTLE"
            form: dict[str, Any] = {"format": "RAW", "subtype": sound.subtype, "endian": endian}
            return soundfile.SoundFile(io.BytesIO(rest), samplerate=sound.samplerate, channels=sound.channels, **form)
    except (soundfile.SoundFileError, TypeError):  # TypeError: of a name that ends in .raw
        return None
    return sound if sound.format in FORMATS else None


def _starts(file: BinaryIO, head: bytes, container_name: str) -> list[int]:
    """Offsets at which a file begins as it does at 0 (one of MP3 with a tag): where files were joined."""
    chunks = head[:4] in (b"RIFF", b"RF64", b"RIFX", b"FORM")
    marks = (b"ID3\3\0\0", b"ID3\4\0\0") if container_name == "MP3" else (head[: 4 if chunks else 6],)
    offsets, offset, window = {0}, 0, b""
    file.seek(0)
    while block := file.read(1 << 17):
        window = window[-11:] + block
        for mark in marks:
            at = window.find(mark)
            while at >= 0:
                if not chunks or window[at + 8 : at + 12] == head[8:12]:
                    offsets.add(offset + at)
                at = window.find(mark, at + 1)
        offset += len(window) - 11
    starts = sorted(offsets)
    return [0] + [at for before, at in pairwise(starts) if at - before > 200]  # first pages of an OGG's streams are closer


def _joined(file: BinaryIO, starts: list[int], name: str) -> Recording:
    file.seek(0)
    data = file.read()
    parts = [
        open_recording(io.BytesIO(data[start:end]), f"{name}, part {number},")
        for number, (start, end) in enumerate(pairwise([*starts, len(data)]), 1)
    ]
    rate = max(part.rate for part in parts)
    lengths = [None if part.samples is None else part.samples * rate // part.rate for part in parts]
    samples = None if None in lengths else sum(length or 0 for length in lengths)
    doubt = next((part.doubt for part in parts if part.doubt), None)
    blocks = lambda: chain.from_iterable(part.blocks() for part in parts)  # noqa: E731
    return Recording(rate, max(part.channels for part in parts), samples, parts[0].format, blocks, doubt)


def truncated(name: str, actual: float, promised: float, unit: str = "s") -> UserError:
    form = ".2f" if unit == "s" else ".0f"
    return UserError(
        f"{name} is truncated: its header promises {promised:{form}} {unit} and {actual:{form}} {unit} are there: "
        "copy or download it again, or convert what is left"
    )


def _promised(sound: soundfile.SoundFile, head: bytes, log: str, name: str) -> int:
    """Samples that a file promises. UserError: the file ends before."""
    if sound.format == "NIST" and (count := re.search(rb"sample_count -i (\d+)", head)):
        return int(count[1])
    for promised, held in [(int(p), int(h)) for p, h in _SIZES.findall(log)]:
        if held < promised < _UNKNOWN:
            seconds = sound.frames / sound.samplerate
            raise truncated(name, seconds, seconds * promised / held) if seconds else truncated(name, held, promised, "bytes")
    return sound.frames


def _blocks(sound: soundfile.SoundFile, file: BinaryIO, promised: int, name: str) -> Iterator[Block]:
    """Blocks of a file that libsndfile reads."""
    import soundfile

    rate, total = sound.samplerate, 0
    if sound.seekable() and sound.tell():
        sound.seek(0)
    while True:
        try:
            with quiet_decoder(sound.format):
                block = sound.read(max(1, _BLOCK // sound.channels), dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise _damaged(name, (sound.tell() if sound.seekable() else total) / rate) from error
        if not len(block):
            break
        total += len(block)
        yield rate, block
    loose = rate // 10 if sound.format in ("MP3", "OGG") else 0  # headers of MP3 count their padding loosely
    if total + loose < promised:
        raise truncated(name, total / rate, promised / rate)
    if sound.format == "MP3" and file.seek(0, os.SEEK_CUR) + _TAGS < file.seek(0, os.SEEK_END):
        yield from _behind(total, by_ffmpeg(file, f"{name} goes on behind its {total / rate:.2f} s and").blocks())


def _behind(skipped: int, blocks: Iterator[Block]) -> Iterator[Block]:
    """Blocks without so many samples at their beginning."""
    for rate, block in blocks:
        rest, skipped = block[skipped:], max(0, skipped - len(block))
        if len(rest):
            yield rate, rest


def _damaged(name: str, seconds: float) -> UserError:
    return UserError(f"{name} is damaged or cut short after {seconds:.2f} s: download or convert it again")


# --- FFmpeg -----------------------------------------------------------------------------------------------------------


def by_ffmpeg(file: BinaryIO, name: str) -> Recording:
    """Open the first sound of a file in FFmpeg. UserError: it is none, has no sound, or the package `av` is not there."""
    try:
        import av
    except ImportError:
        way = "install PyAV (M4A, MP4, WebM, AAC, FLAC of unknown length): pip install av, or convert it to WAV or FLAC"
        raise UserError(f"{name} cannot be read by libsndfile alone: {way}") from None
    try:
        with _av_open(file) as container:
            if not container.streams.audio:
                raise UserError(f"{name} has no sound, only {container.streams[0].type if container.streams else 'data'}")
            stream = container.streams.audio[0]
            codec = stream.codec_context  # None: unknown
            rate, channels = (codec.sample_rate, codec.channels) if codec else (0, 0)
            if not rate or not channels:
                raise UserError(f"{name} {UNREADABLE}")
            demuxer = container.format.name.partition(",")[0]
            seconds = None  # FFmpeg guesses that of others
            if demuxer in ("mov", "matroska", "asf"):
                alone = container.duration / 1e6 if container.duration and len(container.streams) == 1 else None
                seconds = float(stream.duration * stream.time_base) if stream.duration else alone
            form = f"{demuxer} {codec.name}"
    except av.FFmpegError as error:
        raise UserError(f"{name} {UNREADABLE}") from error
    return Recording(
        rate, channels, None if seconds is None else int(seconds * rate), form, lambda: _av_blocks(file, name, seconds)
    )


def _av_open(file: BinaryIO) -> Any:
    import av

    file.seek(0)
    safe = {"format_whitelist": FFMPEG, "protocol_whitelist": ""}  # nothing that a file names is opened
    return av.open(file, options=safe, metadata_errors="replace")


def _av_blocks(file: BinaryIO, name: str, promised: float | None) -> Iterator[Block]:
    import av
    import numpy as np

    seconds, held, before = 0.0, 0, (0, 0)
    frames: list[np.ndarray] = []
    with _av_open(file) as container:
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        try:
            for frame in container.decode(stream):
                shape = frame.sample_rate, frame.layout.nb_channels
                if frames and (held >= _BLOCK or shape != before):
                    yield before[0], np.concatenate(frames)
                    held, frames = 0, []
                before, held = shape, held + frame.samples * shape[1]
                seconds += frame.samples / frame.sample_rate
                samples = frame.to_ndarray()
                frames.append(full_scale(samples.T if frame.format.is_planar else samples.reshape(frame.samples, -1)))
        except (av.FFmpegError, ValueError) as error:  # ValueError: samples of 64 bits
            raise _damaged(name, seconds) from error
    if frames:
        yield before[0], np.concatenate(frames)
    if promised is not None and seconds + 0.1 < promised:
        raise truncated(name, seconds, promised)


def full_scale(samples: np.ndarray) -> np.ndarray:
    """Samples of any type as float32, full scale being 1: integers are divided by their range, uint8 around 128."""
    import numpy as np

    if samples.dtype.kind == "f":
        return np.ascontiguousarray(samples, dtype=np.float32)
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    return samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min)


# --- the first bytes --------------------------------------------------------------------------------------------------


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


_CHATTER = re.compile(  # what libmpg123 writes, some of it after an empty line
    rb"^\n?(?:\[\S*libmpg123/\S+\] |mpg123 [Pp]rogrammer|Warning: (?:Xing stream|Encountered more|Big change|Real sample)"
    rb"|Note: (?:Illegal|Trying to resync|Hit end of|Skipped|missing|Junk at|Looks like|Could be|Xing|Info: |broken|Cut|free)"
    rb").*\n?",
    re.MULTILINE,
)
_LOCK = threading.RLock()


@contextmanager
def quiet_decoder(sound_format: str | None) -> Iterator[None]:
    """Suppresses the messages that libmpg123, libsndfile's MP3 decoder, writes to standard error; other kinds than `MP3` and
    `MPEG` are left alone. It bypasses Python, so the file descriptor is redirected meanwhile; what others write is passed on
    afterwards."""
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
