"""Footers in parts: each group's own footer says what the file's says of it, and what is no footer is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omni.errors import UserError
from tests.train.data.rows.test_rows import rows
from train.data.rows.footer import END, cut_footer
from train.data.rows.footer_scan import scan
from train.data.rows.row import features, to_plain

WRITERS: dict[str, dict[str, Any]] = {
    "as rows are written": {"write_page_checksum": True},
    "no dictionaries": {"use_dictionary": False},
    "no statistics": {"write_statistics": False},
    "version 1": {"version": "1.0", "compression": "none"},
    "pages of version 2, with an index": {"data_page_version": "2.0", "write_page_index": True, "compression": "zstd"},
    "no Arrow schema": {"store_schema": False},
    "other names of elements": {"use_compliant_nested_type": False},
    "encodings by column": {"use_dictionary": ["id"], "column_encoding": {"version": "DELTA_BINARY_PACKED"}},
}


def table(count: int) -> pa.Table:
    return pa.Table.from_pylist([to_plain(row) for row in rows(count)], schema=features().arrow_schema)


def footer_of(file: Path) -> bytes:
    content = file.read_bytes()
    return content[-END - int.from_bytes(content[-END:-4], "little") : -END]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("groups", [0, 1, 14, 15, 200])
def test_a_groups_own_footer_is_what_the_files_says_of_it(writer, groups, tmp_path):
    """14, 15 and 200: a list's size is part of its header, a byte of its own, two bytes."""
    file, few = tmp_path / "data.parquet", table(5)
    with pq.ParquetWriter(file, few.schema, **WRITERS[writer]) as opened:
        for group in range(groups):
            opened.write_table(few.slice(0, group % 3 + 1 if group % 7 else 5))
    wanted, cut, content = pq.read_metadata(file), cut_footer(file), file.read_bytes()
    assert (cut.size, cut.mtime_ns) == (file.stat().st_size, file.stat().st_mtime_ns)
    assert len(cut.rows) == wanted.num_row_groups == groups and cut.rows.sum() == wanted.num_rows
    for group in range(groups):
        place, length = int(cut.places[group]), int(cut.lengths[group])
        found = pq.read_metadata(cut.shared.file(content[place : place + length], int(cut.rows[group])))
        whole = wanted.row_group(group)
        assert found.row_group(0).to_dict() == whole.to_dict()
        assert (found.num_rows, cut.rows[group], cut.sizes[group]) == (whole.num_rows, whole.num_rows, whole.total_byte_size)
        assert found.schema.equals(wanted.schema) and found.metadata == wanted.metadata
        assert found.created_by == wanted.created_by and found.num_row_groups == 1
    assert pq.read_metadata(cut.shared.file()).schema.equals(wanted.schema)


def test_files_of_one_writer_share_what_they_share(tmp_path):
    for number in range(3):
        pq.write_table(table(number + 1), tmp_path / f"{number}.parquet", row_group_size=2)
    assert len({cut_footer(tmp_path / f"{number}.parquet").shared for number in range(3)}) == 1


# --- a small writer of Thrift's compact protocol ------------------------------------------------------------------------


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def zigzag(number: int) -> bytes:
    return varint(2 * number if number >= 0 else -2 * number - 1)


def binary(data: bytes) -> bytes:
    return varint(len(data)) + data


def listed(kind: int, values: list[bytes]) -> bytes:
    head = bytes([len(values) << 4 | kind]) if len(values) < 15 else bytes([0xF0 | kind]) + varint(len(values))
    return head + b"".join(values)


def struct(fields: dict[int, tuple[int, bytes]], long: bool = False) -> bytes:
    """Fields by id, each a kind and a value; with `long`, headers as after a large gap between ids."""
    out, before = b"", 0
    for name, (kind, value) in fields.items():
        short = 0 < name - before < 16 and not long
        out += (bytes([name - before << 4 | kind]) if short else bytes([kind]) + zigzag(name)) + value
        before = name
    return out + b"\0"


def nested(depth: int) -> bytes:
    return struct({1: (12, nested(depth - 1))}) if depth else struct({})


EVERY = {
    1: (1, b""), 2: (2, b""), 3: (3, b"\xff"), 4: (4, zigzag(-300)), 5: (5, zigzag(2**31 - 1)), 6: (6, zigzag(-(2**62))),
    7: (7, bytes(8)), 8: (8, binary(b"\x00\x19\x1c" * 50)), 40: (9, listed(8, [binary(b"a"), binary(b"")])),
    41: (9, listed(1, [b"\x01", b"\x02"])), 42: (9, listed(12, [struct({}), struct({2: (9, listed(5, []))})])),
    43: (9, listed(9, [listed(6, [zigzag(7)] * 20)])), 44: (12, nested(9)), 45: (13, bytes(16)), 46: (9, listed(7, [bytes(8)])),
}  # fmt: skip
"""A field of every kind."""


def footer(*groups: tuple[int, int], long: bool = False) -> bytes:
    """A footer of groups of some rows and bytes, with fields that no version of the format has yet."""
    unknown = {50 + name: value for name, value in EVERY.items()}
    made = [struct({1: (12, struct(EVERY)), 2: (6, zigzag(b)), 3: (6, zigzag(r)), **unknown}, long) for r, b in groups]
    rows = sum(rows for rows, _ in groups)
    fields = {1: (5, zigzag(2)), 2: (12, struct(EVERY)), 3: (6, zigzag(rows)), 4: (9, listed(12, made)), **unknown}
    return struct(fields, long)


def scanned(data: bytes) -> tuple[list[int], ...]:
    return tuple(part.tolist() for part in scan(np.frombuffer(bytearray(data), np.uint8)))


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("count", [0, 3, 15, 300])
def test_every_kind_of_value_is_skipped(count, long):
    groups = [(1000 * i, 7 * i) for i in range(count)]
    data = footer(*groups, long=long)
    outline, places, rows, sizes = scanned(data)
    assert outline[4] == 1 and list(zip(rows, sizes, strict=True)) == groups
    total, after, start, end, _ = outline
    assert data[total:after] == zigzag(sum(rows)) and data[start] & 15 == 12
    assert (places or [end])[0] == start + len(listed(12, [b""] * count)) and end <= len(data)
    for first, stop in zip(places, [*places[1:], end], strict=False):
        alone = data[first:stop]
        assert alone.endswith(b"\0") and scanned(struct({3: (6, b"\0"), 4: (9, listed(12, [alone]))}))[0][4] == 1


def test_what_is_cut_short_or_damaged_is_refused_and_nothing_beyond_it_is_read():
    data = footer((16, 100), (3, 20))
    for length in range(len(data)):
        assert not scanned(data[:length])[0][4], length
    assert not scanned(data + b"\0")[0][4]
    for bad in (
        struct({4: (9, listed(12, [])), 3: (6, b"\0")}, long=True),  # the other way round
        struct({3: (6, b"\0")}),
        struct({3: (6, b"\0"), 4: (9, b"\xfc" + varint(2**60))}),
        struct({3: (6, b"\0"), 4: (9, listed(12, [])), 5: (8, varint(2**62))}),
        struct({3: (6, b"\0"), 4: (9, listed(12, [])), 5: (12, nested(100))}),
        struct({3: (6, b"\0"), 4: (9, listed(12, [])), 5: (11, b"\0")}),  # a map
        struct({3: (6, b"\0"), 4: (9, listed(8, []))}),
        struct({3: (6, b"\xff" * 30 + b"\0"), 4: (12, b"\0")}),
    ):
        assert not scanned(bad)[0][4], bad
    rng = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        outline, places, *_ = scanned(bytes(damaged))
        assert not outline[4] or all(0 <= place <= len(data) for place in (*outline[:4], *places))


def test_what_is_no_parquet_file_is_refused(tmp_path):
    file = tmp_path / "data.parquet"
    pq.write_table(table(4), file, row_group_size=2)
    whole = file.read_bytes()
    swapped = whole[:-END] + (1 << 30).to_bytes(4, "little") + b"PAR1"
    for content, said in (
        (b"", "does not end as one"),
        (b"PAR1", "does not end as one"),
        (whole[:-1], "does not end as one"),
        (whole[: len(whole) // 2], "does not end as one"),
        (whole[:-4] + b"PARE", "encrypted"),
        (swapped, "does not end as one"),
        (whole.replace(footer_of(file), b"\0" * len(footer_of(file))), "damaged"),
        (whole.replace(footer_of(file), footer_of(file).replace(b"\x16\x08", b"\x16\x0a", 1)), "damaged"),
    ):
        file.write_bytes(content)
        with pytest.raises(UserError, match=f"data.parquet is not a whole Parquet file .*{said}.*prepare it again"):
            cut_footer(file)
    with pytest.raises(UserError, match="is not a whole Parquet file .*No such file"):
        cut_footer(tmp_path / "gone.parquet")
