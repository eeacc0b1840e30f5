"""Keeps libmpg123, libsndfile's MP3 decoder, from writing on standard error."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
def quiet_decoder(kind: str | None) -> Iterator[None]:
    """Suppresses the messages that libmpg123, libsndfile's MP3 decoder, writes to standard error; other kinds than `MP3` and
    `MPEG` are left alone.

    It bypasses Python, so the file descriptor is redirected meanwhile; what others write is passed on afterwards.
    """
    if kind not in ("MP3", "MPEG"):
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
