"""Delimited text as people write it: delimiters, line ends, quotes; and what an open quote may cost."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from omni.errors import UserError
from train.data.readers.containers import open_records
from train.data.readers.records import TableRecords


def table(path: Path, text: str) -> TableRecords:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    records = open_records(path)
    assert isinstance(records, TableRecords)
    return records


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("start", ["", "\ufeff", "sep={}\n"])
def test_delimiters_and_line_ends_are_found(tmp_path, name, delimiter, end, start):
    rows = [["wav", "text", "more"], ["a/0.wav", "hallo, du; da | dort".replace(delimiter, " "), "1"], ["a/1.wav", "zwei", "2"]]
    lines = start.format(delimiter).replace("\n", end) + "".join(delimiter.join(row) + end for row in rows)
    found = list(table(tmp_path / name, lines).iterate())
    assert [dict(record.data) for record in found] == [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [record.where.split()[-1] for record in found] == (["3", "4"] if start.startswith("sep") else ["2", "3"])


LINES = [f"wavs/{i}.wav,sentence {i}" for i in range(60)]


def opened(at: int, closed: int | None = None, place: str = "text") -> list[str]:
    lines = list(LINES)
    lines[at] = lines[at].replace(",", ',"') if place == "text" else f'"{lines[at]}'
    if closed is not None:
        lines[closed] += '"'
    return lines


@pytest.mark.parametrize(
    ("lines", "broken"),
    [
        (opened(10), [10]),
        (opened(10, 40), [10]),
        (opened(59), [59]),
        (opened(10)[:20] + opened(30)[20:], [10, 30]),
        ([*LINES[:10], 'wavs/10.wav,"said "well" so', *LINES[11:]], [10]),
        ([*LINES[:10], 'wavs/10.wav,"open', 'wavs/11.wav,"a quoted, text"', *LINES[12:]], [10]),
        ([*LINES[:10], 'wavs/10.wav,"open', "one,two,three", *LINES[12:]], [10, 11]),
        (['"a.wav","a"', 'wavs/2.wav,"sentence 2', *['"wavs/3.wav","sentence 3"', "b.wav,b"] * 1500], [1]),
    ],
)
def test_an_open_quote_costs_its_own_row(tmp_path, lines, broken):
    records = table(tmp_path / "a.csv", "wav,text\n" + "\n".join(lines) + "\n")
    found = list(records.iterate())
    assert len(records) == len(found) == len(lines)
    assert [number for number, record in enumerate(found) if record.error] == broken
    assert all(record.where == f"{tmp_path / 'a.csv'} line {number + 2}" for number, record in enumerate(found))
    assert all(records.first() == found[0].data and list(records.iterate(i, i + 7)) == found[i : i + 7] for i in range(60))


@pytest.mark.parametrize(
    "text",
    [
        "two\nlines",
        'He said "hi, there"\nand left, at once',
        "1. first\n2. second\n\n3. third",
        "x" * 50_000 + "\n" + "y" * 50_000,
    ],
)
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_quoted_texts_of_several_lines_are_read(tmp_path, text, columns):
    values = [text, "b", "c"][:columns]
    row = ",".join('"' + value.replace('"', '""') + '"' for value in values)
    names = ["text", "b", "c"][:columns]
    found = list(table(tmp_path / "a.csv", ",".join(names) + f"\n{row}\n{row}\n").iterate())
    assert [list(record.data.values()) for record in found] == [values, values]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('a,"b\nwavs/0.wav,x\n', "line 1: its names of columns are no row of a table"),
        ("a," * 100_000, "its first line is too long"),
    ],
)
def test_a_first_line_that_names_no_columns_is_one_line_of_error(tmp_path, text, why):
    with pytest.raises(UserError, match=why) as error:
        table(tmp_path / "a.csv", text).layout  # noqa: B018
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_json_lines_may_be_an_array_or_end_in_commas(tmp_path):
    wanted = [{"a": 1}, {"a": 2}]
    for text in ('[{"a": 1},\n{"a": 2}]', '{"a": 1},\n{"a": 2},\n', ' [\n{"a": 1}, {"a": 2},\n]\n'):
        (tmp_path / "a.jsonl").write_text(text)
        records = open_records(tmp_path / "a.jsonl")
        assert [dict(record.data) for record in records.iterate()] == wanted and len(records) == 2
    (tmp_path / "a.jsonl").write_text('[{"a": 1}]\n{"a": 2}\n')
    *whole, last = open_records(tmp_path / "a.jsonl").iterate()
    assert [record.data for record in whole] == wanted[:1] and "more follows the end of the array" in last.error
