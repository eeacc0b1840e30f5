"""Files of records: every slice of them is what reading all of them gives, and damage is one record's, not the file's."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.train.data.readers.toys import write_parquet
from train.data.readers import records as text_records
from train.data.readers.containers import ParquetRecords, open_records

WORDS = ["plain", 'a "quoted", word', "two\nlines", "tab\tthere", "é ü 中文 🙂", " ", "[1, {2}]", "back\\slash"]


def values(count: int, tabs: bool = False) -> list[dict[str, str]]:
    words = [word for word in WORDS if not tabs or not set(word) & set("\n\t")]
    return [{"id": str(i), "text": words[i % len(words)]} for i in range(count)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    """The rows in the form that the file's ending says."""
    kind = path.name.removesuffix(".gz").split(".")[-1]
    if kind == "parquet":
        return write_parquet(path, rows, row_group=7)
    text = io.StringIO()
    if kind == "csv":
        writer = csv.DictWriter(text, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    elif kind == "tsv":
        text.write("id\ttext\n" + "".join(f"{row['id']}\t{row['text']}\n" for row in rows))
    elif kind == "json":
        json.dump(rows, text, ensure_ascii=False, indent=1)
    else:
        text.write("\n".join(json.dumps(row, ensure_ascii=len(row["text"]) % 2 == 0) for row in rows) + "\n\n")
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.csv.gz", "a.json.gz"])
def test_every_slice_is_a_slice_of_all(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text_records, "_CHUNK", 50)  # elements of a JSON array lie across chunks
    wanted = values(21, tabs=name.endswith("tsv"))
    records = open_records(write(tmp_path / name, wanted))
    found = list(records.iterate())
    assert [dict(record.data) for record in found] == wanted and not any(record.error for record in found)
    assert len({record.where for record in found}) == 21 and len(records) == 21
    for start in range(0, 24):
        for stop in (start, start + 1, start + 5, None):
            assert list(open_records(tmp_path / name).iterate(start, stop)) == found[start:stop], (start, stop)
    for starts in (range(0, 21, 5), range(0, 21, 10), (5, 0, 15, 10, 20, 5)):  # one after another, with gaps, to and fro
        for start in starts:
            assert list(records.iterate(start, start + 5)) == found[start : start + 5], (starts, start)
    copy = pickle.loads(pickle.dumps(records))
    assert list(copy.iterate(17, 19)) == found[17:19]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.json.gz", "a.jsonl", "a.csv", "a.json", "a.parquet"])
@pytest.mark.parametrize("step", [3, 9])  # another process may take what lies between
def test_stretches_that_follow_each_other_read_a_file_once(tmp_path, monkeypatch, name, step):
    """Otherwise reading by blocks would take time that grows with the square of the records."""
    path = write_parquet(tmp_path / name, values(60), 60) if name.endswith("parquet") else write(tmp_path / name, values(60))
    found = list(open_records(path).iterate())
    records = open_records(path)
    assert len(records) == 60
    opened = []
    if isinstance(records, ParquetRecords):
        monkeypatch.setattr(ParquetRecords, "_open", _noted(opened, ParquetRecords._open))
    else:
        monkeypatch.setattr(text_records, "open_binary", _noted(opened, text_records.open_binary))
    for start in range(0, 60, step):
        assert list(records.iterate(start, start + 3)) == found[start : start + 3]
    assert len(opened) == 1
    assert list(records.iterate(3, 6)) == found[3:6]  # back again
    assert len(opened) == 2


def _noted(calls: list, function):
    def noting(*args):
        calls.append(args)
        return function(*args)

    return noting


def test_another_process_does_not_go_on_with_an_open_file(tmp_path, monkeypatch):
    """A fork shares the place in a file with its parent."""
    records, opened = open_records(write(tmp_path / "a.jsonl.gz", values(9))), []
    wanted = list(records.iterate())
    monkeypatch.setattr(text_records, "open_binary", _noted(opened, text_records.open_binary))
    list(records.iterate(0, 3))
    monkeypatch.setattr(text_records.os, "getpid", lambda: -1)
    assert list(records.iterate(3, 6)) == wanted[3:6] and len(opened) == 2


RAW = pa.array([b"q"] * 20 + [b"\xff"] + [b"q"] * 179, pa.binary())
NOT_UTF8 = pa.Array.from_buffers(pa.utf8(), 200, RAW.buffers())


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (NOT_UTF8, "holds a text that is not UTF-8"),
        (pa.array([*[0] * 20, 10**18, *[0] * 179], pa.timestamp("ms")), "cannot be read ("),
        (pa.array([*[0] * 20, 10**8, *[0] * 179], pa.date32()), "cannot be read ("),
    ],
    ids=["text", "time", "date"],
)
def test_a_value_in_parquet_that_python_has_none_for_costs_its_own_row(tmp_path, column, why):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [str(i) for i in range(200)], "value": column}), path)
    found = list(open_records(path).iterate())
    assert [i for i, record in enumerate(found) if record.error] == [20]
    assert found[20].where == f"{path} row 20" and found[20].error.startswith(f"its column 'value' {why}")
    records = open_records(path)
    for start, stop in ((0, 32), (16, 21), (20, 21), (21, 32), (32, 64), (10, 200)):
        assert list(records.iterate(start, stop)) == list(open_records(path).iterate(start, stop)) == found[start:stop]


def test_places_are_lines_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"a": 1}\n\n\n{"a": 2}\n')
    assert [record.where for record in open_records(tmp_path / "a.jsonl").iterate()] == [
        f"{tmp_path / 'a.jsonl'} line {line}" for line in (2, 5)
    ]
    (tmp_path / "a.csv").write_text('a,b\n1,"x\ny"\n2,z\n')
    assert [record.where.split()[-1] for record in open_records(tmp_path / "a.csv").iterate()] == ["2", "4"]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    for name, text in (
        ("a.csv", "id,text\n1,b\n"),
        ("a.jsonl", '{"id": "1", "text": "b"}\n'),
        ("a.json", '[{"id": "1", "text": "b"}]'),
    ):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert [dict(r.data) for r in open_records(tmp_path / name).iterate()] == [{"id": "1", "text": "b"}], name


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("a.jsonl", b'{"id": "1", "text": ', "is no JSON"),
        ("a.jsonl", b'{"id": "\xff"}', "is no JSON"),
        ("a.csv", b"1,two,three", "has 3 values, the first line names 2 columns: quote or fix it"),
        ("a.csv", b"1,\xff\xfe", "is not UTF-8"),
        ("a.csv", b'1,"a"b', "is no row of a table"),
        ("a.tsv", b"1\ta\tb", "has 3 values, the first line names 2 columns: fix it (tabs part values, which are not quoted"),
    ],
)
def test_a_broken_line_is_named_and_the_rest_goes_on(tmp_path, name, broken, why):
    rows = write(tmp_path / name, values(4, tabs=True)).read_bytes().splitlines(keepends=True)
    header = 1 if name.endswith("sv") else 0
    (tmp_path / name).write_bytes(b"".join([*rows[: header + 2], broken + b"\n", *rows[header + 2 :]]))
    records = list(open_records(tmp_path / name).iterate())
    assert [record.data.get("id", "-") for record in records] == ["0", "1", "-", "2", "3"]
    assert records[2].error.startswith(why) and records[2].where == f"{tmp_path / name} line {header + 3}"


@pytest.mark.parametrize("tail", ['{"id": }, {"id": "9"}]', '{"id": "2"', "", "]"])
def test_a_json_array_that_breaks_off_gives_what_stood_before(tmp_path, tail):
    (tmp_path / "a.json").write_text('[{"id": "0"}, {"id": "1"}, ' + tail)
    records = list(open_records(tmp_path / "a.json").iterate())
    assert [record.data["id"] for record in records[:2]] == ["0", "1"]
    assert [record.where.split()[-1] for record in records[2:]] == ([] if tail == "]" else ["2"])
    assert all("what follows cannot be read" in record.error for record in records[2:])
    assert len(open_records(tmp_path / "a.json")) == len(records)


def test_numbers_of_a_json_array_are_not_split(tmp_path, monkeypatch):
    monkeypatch.setattr(text_records, "_CHUNK", 5)
    (tmp_path / "a.json").write_text('[1234567890, 12, {"id": "0"}]')
    records = list(open_records(tmp_path / "a.json").iterate())
    assert [record.error[:6] for record in records] == ["is int", "is int", ""] and records[2].data == {"id": "0"}


def test_a_packed_file_that_breaks_off_gives_what_stood_before(tmp_path):
    import random

    draw = random.Random(0)
    lines = [json.dumps({"id": str(i), "noise": draw.random()}) for i in range(2000)]
    packed = gzip.compress("\n".join(lines).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    records = list(open_records(tmp_path / "a.jsonl.gz").iterate())
    assert 100 < len(records) < 1900 and records[-1].error.startswith("the file cannot be read from here on")
    assert [record.data["id"] for record in records[:-1]] == [str(i) for i in range(len(records) - 1)]


@pytest.mark.parametrize("checksums", [True, False])  # with none, only what packed the page can tell
def test_a_damaged_page_costs_the_rest_of_its_row_group(tmp_path, checksums):
    rows = [{"id": str(i), "text": f"{i * 7919}" * 5} for i in range(12)]
    path = write_parquet(
        tmp_path / "a.parquet",
        rows,
        4,
        write_page_checksum=checksums,
        use_dictionary=False,
        compression="none" if checksums else "gzip",
    )
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    if checksums:
        data[end - 3] ^= 1  # a letter of a text, which nothing else could tell
    else:
        data[end - 24 : end - 4] = bytes(20)
    path.write_bytes(data)
    records = list(open_records(path).iterate())
    assert [record.data.get("id", "-") for record in records] == [*"0123", *"----", *"89", "10", "11"]
    assert all(
        record.error.startswith("lies in or behind a damaged page of row group 1") and record.where == f"{path} row {i}"
        for i, record in enumerate(records)
        if record.error
    )
    assert list(open_records(path).iterate(6, 9)) == records[6:9]


def test_a_parquet_file_that_cannot_be_opened_is_one_broken_record(tmp_path):
    whole = write_parquet(tmp_path / "a.parquet", values(9)).read_bytes()
    for data in (whole[:-20], b"", b"no parquet at all"):
        (tmp_path / "a.parquet").write_bytes(data)
        records = open_records(tmp_path / "a.parquet")
        (record,) = records.iterate()
        assert record.error.startswith("is no whole Parquet file (") and record.where == str(tmp_path / "a.parquet")
        assert len(records) == 1 and list(records.iterate(1)) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"])
def test_memory_does_not_grow_with_the_records(tmp_path, name):
    """Twenty thousand records take no more than a thousand: tracemalloc counts Python's own memory."""
    peaks = []
    for count in (2_000, 20_000):
        rows = [{"id": str(i), "text": "x" * 50} for i in range(count)]
        path = write_parquet(tmp_path / name, rows, 1000) if name.endswith("parquet") else write(tmp_path / name, rows)
        list(open_records(path).iterate(0, 10))  # imports, and what is kept once
        tracemalloc.start()
        records = open_records(path)
        assert sum(1 for _ in records.iterate()) == len(records) == count
        assert sum(1 for start in range(0, count, 500) for _ in records.iterate(start, start + 500)) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**22
