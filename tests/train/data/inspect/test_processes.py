"""`data validate`, `filter` and `stats` find the same in one process and in several, byte for byte; and scans of rows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from tests.train.data.inspect.toys import noise, row, stored, wav
from tests.train.data.prepare.test_prepare import files_of
from train.cli import main
from train.data.inspect import scan as module
from train.data.inspect.checks import Bounds, Codecs, Findings
from train.data.inspect.scan import Scan
from train.data.inspect.validate import row_checks, validate
from train.data.prepare.shards import REPORT
from train.data.rows.files import DataFiles
from train.data.rows.row import Sound

COUNT = 60


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with duplicates of several kinds, some of rows that are dropped; bad rows; a damaged row group; no Parquet."""
    dice, rows = random.Random(0), list(map(row, range(COUNT)))
    for place in range(20, COUNT, 2):
        first = dice.randrange(place)
        turn, other = rows[place].turns[0], rows[first].turns[0]
        again = replace(turn, question_text=other.question_text, answer_text=other.answer_text)
        turns = dice.choice([replace(turn, question_audio=other.question_audio), again, other])
        rows[place] = replace(rows[place], turns=(turns,))
    rows[52] = row(52, question_audio=row(1).turns[0].question_audio)
    rows[58] = row(58, question_text=row(52).turns[0].question_text, answer_text=row(52).turns[0].answer_text)
    rows[7] = replace(rows[7], speaker="nobody", turns=rows[50].turns)
    rows[11] = row(11, question_audio=Sound(data=b"RIFF"))
    rows[31] = row(31, question_audio=Sound(data=wav(noise(9, 1))))
    folder = stored(tmp_path / "data", rows, per_file=25)
    (folder / "rows-00003.parquet").write_bytes(b"PAR1 and no more")
    file = folder / "rows-00001.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)
    return folder


def test_the_pieces_of_a_scan_are_all_of_it_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Scan(data)
    every = [(item.index, item.where) for item in scan]
    assert any(item.plain is None and item.count for item in scan)
    for size in (1, 2, 7, 100):
        monkeypatch.setattr(module, "PIECE", size)
        parts = [scan.part(rows) for rows in scan.pieces()]
        assert [(item.index, item.where) for part in parts for item in part] == every
        assert sum(map(len, scan.pieces())) == len(scan)
        assert sum(len(part.numbers()) for part in parts) <= len(scan.files) + len(parts)  # files are not searched


def test_report_and_footers_are_read_once_for_all_pieces(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described, head = DataFiles.described, Scan._head
    reports: list[int] = []
    footers: list[Any] = []
    monkeypatch.setattr(DataFiles, "described", lambda self: reports.append(1) or described(self))
    monkeypatch.setattr(module, "PIECE", 1)
    scan = Scan(data)
    monkeypatch.setattr(Scan, "_head", lambda self, file: footers.append(file) or head(self, file))
    reports.clear()
    check = row_checks(scan, Bounds(), Codecs())
    assert all(check(rows) for rows in scan.pieces()) and len(reports) == 1 and footers == scan.files


@pytest.mark.long
def test_a_bucket_is_looked_at_like_a_folder(bucket: Any, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With faults, damage, and a checksum that is not that of the report."""
    (data / REPORT).write_text(json.dumps({"shards": [{"file": "rows-00000.parquet", "crc32": 1}]}))
    address = bucket.put_all(data, "rows")
    bucket.server.errors, bucket.server.cuts = 0.05, 0.05
    told = []
    for place in (str(data), address):
        assert main(["data", "validate", place, "--progress", "off", "--examples", "9"]) == 1
        assert main(["data", "stats", place, "--progress", "off"]) == 0
        told.append(capsys.readouterr().out.replace(place, "DATA"))
    assert told[0] == told[1] and "its CRC-32 is not that" in told[0] and "DATA/rows-00001.parquet row group" in told[0]
    with pytest.raises(UserError, match=f"{address} is compared with itself"):
        validate(Path(address), [Path(f"{address}/")], Bounds(), Codecs(), Findings())


def test_a_part_reads_its_own_rows_of_a_bucket(bucket: Any, tmp_path: Path) -> None:
    dice = random.Random(0)
    rows = [row(i, question_audio=Sound(data=dice.randbytes(1 << 18))) for i in range(32)]
    address = bucket.put_all(stored(tmp_path, rows, per_file=8), "rows")
    bucket.server.seen.clear()
    scan = Scan(address)
    assert bucket.server.seen == {"LIST": 1, "GET": 4}  # the ends of the files
    for number in range(4):
        assert [item.index for item in scan.part(range(8 * number, 8 * number + 8))] == [*range(8 * number, 8 * number + 8)]
        assert bucket.server.seen["GET"] == 5 + number


RULES = [
    "drop_duplicates: [row, question_audio, text]",
    "speakers: [s0, s1, s2]",
    "drop_duplicates: [text]\nspeakers: [s0, s2]\nquestion_seconds: {max: 5}",
]


@pytest.fixture
def small(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows, so that there are many."""
    monkeypatch.setattr(module, "PIECE", 7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rules", RULES)
def test_processes_filter_the_bytes_of_one(small: None, rules: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules)
    for workers in ("0", "2"):
        options = ["--rules", str(tmp_path / "rules.yaml"), "--progress", "off", "--workers", workers]
        assert main(["data", "filter", str(data), str(tmp_path / workers), *options]) == 0
    assert files_of(tmp_path / "0") == files_of(tmp_path / "2")
    reasons = (tmp_path / "0" / "dropped.jsonl").read_text()
    assert ("an earlier row has the same" in reasons) == ("drop" in rules) and "damaged pages" in reasons
    dropped = {json.loads(line)["row"] for line in reasons.splitlines()}
    assert rules != RULES[0] or (52 in dropped and 58 not in dropped)  # no duplicate of a row that is dropped as one


@pytest.mark.long
def test_processes_validate_as_one(small: None, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = stored(tmp_path / "other", [row(i) for i in range(40, 80, 2)], per_file=7)
    (other / "rows-00009.parquet").write_bytes(b"nothing")
    (data / REPORT).write_text(json.dumps({"shards": [{"file": "rows-00002.parquet", "crc32": 1}]}))
    told = []
    for workers in ("0", "2"):
        files = ["--report", str(tmp_path / f"{workers}.json"), "--findings", str(tmp_path / f"{workers}.jsonl")]
        options = ["--against", str(other), "--progress", "off", "--examples", "2", "--workers", workers]
        assert main(["data", "validate", str(data), *options, *files]) == 1
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    for kind in ("json", "jsonl"):
        assert (tmp_path / f"0.{kind}").read_bytes() == (tmp_path / f"2.{kind}").read_bytes()
    found = json.loads((tmp_path / "0.json").read_text())["findings"]
    kinds = {"duplicate_row", "duplicate_audio", "duplicate_text", "leaked_audio", "leaked_text", "leaked_speaker"}
    assert kinds | {"changed_file", "damaged_pages", "unreadable_file"} <= set(found)


@pytest.mark.long
def test_processes_count_as_one(small: None, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for workers in ("0", "2"):
        out = tmp_path / workers
        options = ["--preset", "nano", "--tasks", "A1T1", "A1T2", "--progress", "off", "--workers", workers]
        assert main(["data", "stats", str(data), *options, "--out", str(out)]) == 0
        told.append(capsys.readouterr().out.replace(str(out), "OUT"))
    assert told[0] == told[1] and files_of(tmp_path / "0") == files_of(tmp_path / "2")
    found = json.loads((tmp_path / "0" / "stats.json").read_text())
    assert found["noted"] and found["rows"] > 30
