"""Rows of other people's data that lack what they need: named with file, place and reason, and the others are read."""

from __future__ import annotations

import pytest

from tests.train.data.readers.toys import only_broken, write_lines, write_tone
from train.data.readers import Broken, ReaderOptions, open_source
from train.data.readers.files import Files
from train.data.readers.records import JsonLines
from train.data.readers.source import RecordSource, RowMapper
from train.data.rows.row import Row

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("name", "good", "bad", "why"),
    [
        ("a.jsonl", {"source_text": "a", "target_text": "b"}, {"source_text": "a"}, "has no field 'answer' or 'target_text'"),
        ("a.jsonl", {"question_text": "a"}, {"question_text": " ", "id": 1}, "turn 0 holds neither text, recording nor codes"),
        (
            "a.jsonl",
            {"conversations": [{"from": "human", "value": "a"}]},
            {"conversations": [{"from": "human", "value": "<speech>"}]},
            "its texts have tags (<audio>) of 1 recordings, 0 are there",
        ),
        ("a.jsonl", CHAT, {"messages": [{"role": "user", "content": ""}]}, "question 0 has no text"),
        ("a.tsv", "client_id\tpath\tsentence\nann\tq.wav\ta", "ann\t\tb", "has no path"),
    ],
)
def test_rows_without_what_they_need(tmp_path, name, good, bad, why):
    write_tone(tmp_path / "clips/q.wav")
    path = write_lines(tmp_path / name, [good, bad])
    broken = only_broken(path)
    assert why in broken.why and broken.where == f"{path} line {3 if name.endswith('tsv') else 2}"


def _choosy(data, where, files, options):
    if data["n"] == 1:
        raise TypeError("nobody thought\nof \ud83d")
    return Row((), where=where)


def test_an_error_that_nobody_thought_of_is_one_item(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"n": 0}, {"n": 1}, {"n": 2}])
    found = list(RecordSource("toy", [JsonLines(path)], RowMapper(_choosy, Files(tmp_path), ReaderOptions())))
    assert found[1] == Broken(f"{path} line 2", r"TypeError: nobody thought of \ud83d")
    assert isinstance(found[0], Row) and isinstance(found[2], Row)


def test_transcripts_whose_lines_are_broken(tmp_path):
    write_tone(tmp_path / "1/2/1-2-0.flac")
    (tmp_path / "1/2/1-2.trans.txt").write_bytes(b"1-2-0 A TEXT\n1-2-1 ANOTHER\n1-2-0\n../1-2-0 A TEXT\n1-2-0 \xff\n")
    found = list(open_source(tmp_path))
    assert isinstance(found[0], Row)
    whys = ("/1/2/1-2-1.flac' is not there", "is not followed by a text", "is not followed by a text", "is not UTF-8")
    for number, (item, why) in enumerate(zip(found[1:], whys, strict=True)):
        assert isinstance(item, Broken) and why in item.why and item.where.endswith(f"1-2.trans.txt line {number + 2}")
