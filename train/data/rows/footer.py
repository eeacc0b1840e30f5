"""Cuts Parquet footers into their row groups, and joins a single one to a footer of its own, which is short to read.

    file      PAR1 | pages | footer | length of the footer, uint32 | PAR1
    footer    head | number of rows | middle | row groups | tail

`head` (version, schema), `middle` (a field's header) and `tail` (key-value metadata, writer, orders) are the same in all files
of one writer; see `footer_scan` for the format. Places in a group's bytes are those of the file, so that a footer of one group
reads that group of the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from train.data.rows.parquet_files import whole

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

END = 8
"""Bytes after the footer."""

_ONE_GROUP = b"\x1c"
"""Header of a list of one struct."""


class SharedFooter(NamedTuple):
    """What is left of a footer without its number of rows and its groups: the bytes before, between and after them."""

    head: bytes
    middle: bytes
    tail: bytes

    def file(self, groups: bytes = b"", rows: int = 0) -> pa.BufferReader:
        """A Parquet file of nothing but a footer: of one row group, given by its bytes and its number of rows, or of none."""
        import pyarrow as pa

        footer = b"".join((self.head, _zigzag(rows), self.middle, _ONE_GROUP if groups else b"\x0c", groups, self.tail))
        return pa.BufferReader(b"".join((b"PAR1", footer, len(footer).to_bytes(4, "little"), b"PAR1")))


@dataclass(frozen=True)
class CutFooter:
    """A file's footer in parts.

    Attributes:
        size, mtime_ns: of the file, when it was read.
        places, lengths: of each group's bytes in the file, int64 [G].
        rows, sizes: of each group: number of rows, and bytes before compression, int64 [G].
    """

    shared: SharedFooter
    size: int
    mtime_ns: int
    places: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    sizes: np.ndarray


def cut_footer(file: Path) -> CutFooter:
    """Read a file's footer and cut it; UserError where it is no whole Parquet file, is encrypted, or has fields in disorder."""
    import numpy as np

    from train.data.rows.footer_scan import scan

    with whole(file), open(file, "rb") as opened:
        status = os.fstat(opened.fileno())
        opened.seek(max(0, status.st_size - END))
        end = opened.read(END)
        length = int.from_bytes(end[:4], "little")
        if end[4:] == b"PARE":
            raise OSError("its footer is encrypted")
        if end[4:] != b"PAR1" or length > status.st_size - END - 4:
            raise OSError("it does not end as one")
        start = status.st_size - END - length
        opened.seek(start)
        data = np.fromfile(opened, np.uint8, length)
        outline, places, rows, sizes = scan(data)
        total, after, groups, tail, good = outline.tolist()
        if not good or len(data) != length or (rows < 0).any() or bytes(data[total:after]) != _zigzag(int(rows.sum())):
            raise OSError("its footer is damaged, or has its fields in another order than writers of Parquet files do")
    shared = SharedFooter(data[:total].tobytes(), data[after:groups].tobytes(), data[tail:].tobytes())
    lengths = np.diff(places, append=tail)
    return CutFooter(shared, status.st_size, status.st_mtime_ns, places + start, lengths, rows, sizes)


def _zigzag(number: int) -> bytes:
    """A number of at least 0 as a zigzag varint."""
    number, out = 2 * number, bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))
