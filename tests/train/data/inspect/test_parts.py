"""`--shard` of `data validate`, `filter` and `stats`: what parts find, joined, is what one machine finds, byte for byte."""

from __future__ import annotations

import json
import random
import re
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from tests.train.data.inspect.toys import noise, row, stored, wav
from tests.train.data.prepare.test_prepare import files_of
from tests.train.data.toys import report
from train.cli import main
from train.data.inspect import collect
from train.data.inspect import digests as module
from train.data.inspect.digests import KnownDigests
from train.data.inspect.scan import Scan, UnreadableRows
from train.data.inspect.validate import open_scans
from train.data.prepare.report import REPORT
from train.data.rows.parquet import write_rows
from train.data.rows.row import Sound

COUNT = 60


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with duplicates of several kinds, some of rows that are dropped; bad rows; a damaged row group; no Parquet."""
    dice, rows = random.Random(0), list(map(row, range(COUNT)))
    for place in range(20, COUNT, 2):
        first = dice.randrange(place)
        turn, other = rows[place].turns[0], rows[first].turns[0]
        turn = dice.choice(
            [
                replace(turn, question_audio=other.question_audio),
                replace(turn, question_text=other.question_text, answer_text=other.answer_text),
                other,
            ]
        )
        rows[place] = replace(rows[place], turns=(turn,))
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


def test_the_parts_of_a_scan_are_all_of_it_once(data: Path) -> None:
    scan = Scan(data)
    every = [(item.index, item.where) for item in scan]
    assert any(isinstance(item, UnreadableRows) and item.count for item in scan)
    for count in (1, 2, 3, 7, 100):
        parts = [scan.part(number, count) for number in range(count)]
        assert [(item.index, item.where) for part in parts for item in part] == every
        assert sum(part.count for part in parts) == len(scan)


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
        open_scans(Path(address), [Path(f"{address}/")])


def test_a_part_reads_its_own_rows_of_a_bucket(bucket: Any, tmp_path: Path) -> None:
    dice = random.Random(0)
    rows = [row(i, question_audio=Sound(data=dice.randbytes(1 << 18))) for i in range(32)]
    address = bucket.put_all(stored(tmp_path, rows, per_file=8), "rows")
    bucket.server.seen.clear()
    scan = Scan(address)
    assert bucket.server.seen == {"LIST": 1, "GET": 4}  # the ends of the files
    for number in range(4):
        assert [item.index for item in scan.part(number, 4)] == [*range(8 * number, 8 * number + 8)]
        assert bucket.server.seen["GET"] == 5 + number
    report(tmp_path)
    again = Scan(bucket.put_all(tmp_path, "reported"))
    bucket.server.seen.clear()
    assert [item.index for item in again.part(3, 4)] == [*range(24, 32)]
    assert bucket.server.seen["GET"] <= 2  # the end of the file, and its rows


def looked_at(scan: Scan) -> list[tuple[int, str, Any]]:
    return [(item.index, item.where, item.why if isinstance(item, UnreadableRows) else item.plain) for item in scan]


def test_a_report_changes_nothing_of_what_is_found(tmp_path: Path) -> None:
    """Damage that it does not show is found where the file is opened."""
    folder = stored(tmp_path, list(map(row, range(COUNT))), per_file=20)
    plain = looked_at(Scan(folder))
    report(folder)
    assert looked_at(Scan(folder)) == plain
    file = folder / "rows-00001.parquet"
    content = file.read_bytes()
    file.write_bytes(content[:-3] + b"XXX")
    found = looked_at(Scan(folder))
    assert found == [*plain[:20], (20, str(file), found[20][2]), *plain[40:]] and "is not a whole" in found[20][2]
    file.write_bytes(content)
    short = Scan(folder)
    write_rows(file, [row(1)])
    (lost,) = [item for item in short if isinstance(item, UnreadableRows)]
    assert lost.count == 20 and "has 1 rows, and 20 by its report" in lost.why


RULES = [
    "drop_duplicates: [row, question_audio, text]",
    "speakers: [s0, s1, s2]",
    "drop_duplicates: [text]\nspeakers: [s0, s2]\nquestion_seconds: {max: 5}",
]


@pytest.mark.parametrize(("rules", "count"), [*zip(RULES, (2, 5, 3), strict=True), (RULES[0], 7)])
def test_the_parts_of_a_filter_give_the_bytes_of_one_machine(rules: str, count: int, data: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rules)
    command = ["data", "filter", str(data)]
    options = ["--rules", str(tmp_path / "rules.yaml"), "--progress", "off"]
    assert main([*command, str(tmp_path / "one"), *options]) == 0
    for number in reversed(range(count)):
        assert main([*command, str(tmp_path / "out"), *options, "--shard", f"{number}/{count}"]) == 0
    assert main(["data", "join", str(tmp_path / "out")]) == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")
    reasons = (tmp_path / "one" / "dropped.jsonl").read_text()
    assert ("an earlier row has the same" in reasons) == ("drop" in rules) and "damaged pages" in reasons
    dropped = {json.loads(line)["row"] for line in reasons.splitlines()}
    assert rules != RULES[0] or (52 in dropped and 58 not in dropped)  # no duplicate of a row that is dropped as one


@pytest.mark.parametrize("count", [2, 5])
def test_the_parts_of_a_validation_find_what_one_machine_finds(count: int, data: Path, tmp_path: Path, capsys) -> None:
    other = stored(tmp_path / "other", [row(i) for i in range(40, 80, 2)], per_file=7)
    (other / "rows-00009.parquet").write_bytes(b"nothing")
    command = ["data", "validate", str(data), "--against", str(other), "--progress", "off", "--examples", "2"]
    (tmp_path / "a").mkdir()
    whole = [*command, "--report", str(tmp_path / "one.json"), "--findings", str(tmp_path / "one.jsonl")]
    assert main(whole) == 1
    told = capsys.readouterr().out
    report = str(tmp_path / "a" / "all.json")
    for number in reversed(range(count)):
        more = ["--report", report, "--findings", str(tmp_path / "all.jsonl"), "--shard", f"{number}/{count}"]
        assert main([*command, *more]) == 0
    capsys.readouterr()
    assert main(["data", "join", report]) == 1
    assert capsys.readouterr().out == told
    for name, of in (("a/all.json", "one.json"), ("all.jsonl", "one.jsonl")):
        assert (tmp_path / name).read_bytes() == (tmp_path / of).read_bytes()
    found = json.loads((tmp_path / "one.json").read_text())["findings"]
    assert {"duplicate_row", "duplicate_audio", "duplicate_text", "leaked_audio", "leaked_text", "leaked_speaker"} <= set(found)


@pytest.mark.parametrize(("count", "kept", "held"), [(3, 100_000, 1 << 20), (5, 100_000, 20), (2, 9, 1 << 20)])
@pytest.mark.few(2)
def test_the_statistics_of_parts_are_those_of_one_machine(
    count: int, kept: int, held: int, data: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for percentiles and pictures where samples are full, and for what is estimated."""
    monkeypatch.setattr(collect.Sample.__init__, "__defaults__", (kept,))
    monkeypatch.setattr(module, "HELD", held)
    command = ["data", "stats", str(data), "--preset", "nano", "--tasks", "A1T1", "A1T2", "--progress", "off"]
    assert main([*command, "--out", str(tmp_path / "one")]) == 0
    told = capsys.readouterr().out.replace(str(tmp_path / "one"), str(tmp_path / "out"))
    for number in reversed(range(count)):
        assert main([*command, "--out", str(tmp_path / "out"), "--shard", f"{number}/{count}"]) == 0
    capsys.readouterr()
    assert main(["data", "join", str(tmp_path / "out")]) == 0
    whole, joined = (json.loads((tmp_path / name / "stats.json").read_text()) for name in ("one", "out"))
    if kept > COUNT and held > 1000:
        assert capsys.readouterr().out == told
        assert files_of(tmp_path / "out") == files_of(tmp_path / "one")
    for name, lengths in joined["lengths"].items():
        assert {**lengths} == {
            **whole["lengths"][name],
            **({p: v for p, v in lengths.items() if p[0] == "p"} if kept < COUNT else {}),
        }
        assert lengths["min"] <= lengths["p5"] <= lengths["p50"] <= lengths["p95"] <= lengths["max"]
    for side, texts in joined["texts"].items():
        assert texts["distinct_texts"] == pytest.approx(whole["texts"][side]["distinct_texts"], rel=0.01)
    assert {**joined, "lengths": 0, "texts": 0} == {**whole, "lengths": 0, "texts": 0} and whole["noted"] and whole["rows"] > 30


def test_parts_that_do_not_fit_are_refused(data: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "rules.yaml").write_text("{}")
    command = ["data", "filter", str(data), str(tmp_path / "out"), "--rules", str(tmp_path / "rules.yaml")]
    assert main([*command, "--shard", "1/3"]) == 0
    assert main([*command, "--shard", "1/3"]) == 0  # whole already
    assert main([*command, "--shard", "0/2"]) == 2
    assert "00001-of-00003 is of 3 parts" in capsys.readouterr().err
    assert main([*command, "--shard", "0/3", "--shard_mb", "3"]) == 2
    assert "shard_mb was 256 and is now 3" in capsys.readouterr().err
    assert main([*command, "--shard", "4/3"]) == 2
    capsys.readouterr()
    assert main(["data", "join", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert "2 parts of 3 not whole: 0/3 (not begun), 2/3" in line
    words = shlex.split(line.partition("This makes 0/3: ")[2])
    assert words[0] == "omni-train" and main(words[1:]) == 0 and main([*command, "--shard", "2/3"]) == 0
    stored(data, [row(0)], per_file=1)
    assert main(["data", "join", str(tmp_path / "out")]) == 2
    assert "has changed since its rows were judged" in capsys.readouterr().err
    assert main(["data", "validate", str(data), "--shard", "0/2"]) == 2
    assert "--shard 0/2 needs --report FILE" in capsys.readouterr().err
    assert main(["data", "stats", str(data), "--shard", "0/2"]) == 2
    assert "--shard 0/2 needs --out FOLDER" in capsys.readouterr().err
    for number in "01":
        assert main(["data", "stats", str(data), "--out", str(tmp_path / "stats"), "--shard", f"{number}/2"]) == 0
    capsys.readouterr()
    samples = tmp_path / "stats.parts" / "00001-of-00002" / "samples.npz"
    whole = samples.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole.replace(b"PK", b"KP")):
        samples.write_bytes(damage)
        assert main(["data", "join", str(tmp_path / "stats")]) == 2
        assert re.search("00001-of-00002 is damaged .*make this part again", capsys.readouterr().err)
    stored(data, [row(0), row(1)], per_file=1)
    assert main(["data", "join", str(tmp_path / "stats")]) == 2
    assert "has changed since its parts were counted" in capsys.readouterr().err


@pytest.mark.parametrize(("held", "items"), [(7, 8), (7, 10_000), (1000, 8)])
def test_known_digests_are_a_set(held: int, items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the filter is full, and takes every digest for known."""
    monkeypatch.setattr(module, "HELD", held)
    monkeypatch.setattr(module, "ITEMS", items)
    dice, known, wanted = random.Random(1), KnownDigests(), set[int]()
    for _ in range(600):
        value = dice.randrange(300) << 55
        assert (value in known) == (value in wanted)
        if dice.random() < 0.5:
            known.add(value)
            wanted.add(value)
    assert len(wanted) > 100


def test_known_digests_say_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD", 2)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "wb"))  # noqa: SIM115
    known = KnownDigests()
    known.add(1)
    with pytest.raises(UserError, match="has no room for digests .*: set TMPDIR"):
        known.add(2)
