"""`data prepare --shard` and `data join`: parts made by several machines give the bytes of one."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from omni.errors import UserError
from omni.files import locked
from tests.train.data.prepare.test_prepare import _interrupted_at, files_of, made, told
from tests.train.data.prepare.toys import ToySource
from train.cli import main
from train.data.prepare import shards
from train.data.prepare import worker as blocks
from train.data.prepare.config import DataPart, PrepareConfig
from train.data.prepare.join import join
from train.data.prepare.parts import items_of
from train.data.prepare.prepare import prepare
from train.data.rows.parquet import StoredRows


class Plain(ToySource):
    """Rows of texts, some of them long, so that a file of a MiB (before compression) has about 70 rows."""

    def __init__(self, count: int = 200, broken: tuple[int, ...] = (3, 70, 71, 130)) -> None:
        super().__init__(count, "text", broken)

    def row(self, index: int):
        row = super().row(index)
        turn = replace(row.turns[0], answer_text=f"it is {index}. " * (20 * (index % 150)))
        return replace(row, turns=(turn,))


def part(out: Path, shard: str, source: ToySource | None = None, **options):
    return made(out, source or Plain(), codec="", shard=shard, **options)


def whole(out: Path, source: ToySource | None = None, **options) -> dict[str, bytes]:
    made(out, source or Plain(), codec="", **options)
    return files_of(out)


@pytest.fixture
def short(monkeypatch):
    """Segments of two blocks."""
    monkeypatch.setattr(shards, "SEGMENT", 64)


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize("segment", [64, 96, shards.SEGMENT])
def test_parts_give_the_bytes_of_one_preparation(count, segment, tmp_path, monkeypatch):
    """Also where the last is made first, where there are more parts than blocks, and where files end within segments."""
    monkeypatch.setattr(shards, "SEGMENT", segment)
    wanted = whole(tmp_path / "whole")
    assert len([name for name in wanted if name.endswith(".parquet")]) > 2
    rows = [part(tmp_path / "out", f"{number}/{count}").rows for number in reversed(range(count))]
    assert sum(rows) == 196 and (0 in rows) == (count > 7)
    assert join(tmp_path / "out") == made(tmp_path / "whole", Plain(), codec="")
    assert files_of(tmp_path / "out") == wanted
    assert len(StoredRows(tmp_path / "out")) == 196 and not (tmp_path / "out.preparing").exists()
    linked = [file for file in (tmp_path / "out").glob("*.parquet") if file.stat().st_nlink > 1]
    assert bool(linked) == (segment < 200)
    assert join(tmp_path / "out").rows == part(tmp_path / "out", f"0/{count}").rows == 196  # whole already


@pytest.mark.parametrize(("total", "count"), [(0, 3), (1, 3), (5000, 7), (10**6, 3), (10**8, 999)])
def test_parts_are_all_items_once(total, count):
    ranges = [items_of(DataPart(number, count), total) for number in range(count)]
    assert ranges[0].start == 0 and ranges[-1].stop == total
    assert all(one.stop == other.start for one, other in itertools.pairwise(ranges))
    assert all(one.start % 32 == 0 or one.start == total for one in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= max(32, total / count / 8)
    if total == 10**8:
        assert all(one.start % shards.SEGMENT == 0 for one in ranges)


def test_a_part_is_read_before_the_others_are_there(tmp_path):
    part(tmp_path / "out", "1/2")
    place = tmp_path / "out.parts" / "00001-of-00002"
    texts = [row.turns[0].question_text for row in StoredRows(place, tmp_path / "cache")]
    assert texts == [f"what is {i}" for i in range(96, 200) if i != 130]
    assert len(StoredRows(place)) == 103
    assert (place / "broken.csv").read_text().splitlines()[1].startswith("130,toy.jsonl row 130,")


def test_a_part_that_was_cut_short_is_named_and_gone_on_with(tmp_path, monkeypatch, short):
    wanted = whole(tmp_path / "whole")
    part(tmp_path / "out", "0/3")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks.BlockMaker, "make", _interrupted_at(192, blocks.BlockMaker.make))
        part(tmp_path / "out", "2/3")
    work = tmp_path / "out.parts" / "00002-of-00003.preparing"
    assert list(work.glob("rows-*.parquet"))
    for _ in range(2):
        with pytest.raises(UserError, match=r"2 parts of 3 not whole: 1/3 \(not begun\), 2/3 \(cut short\)\. This makes 1/3: "):
            join(tmp_path / "out")
    part(tmp_path / "out", "1/3")
    with pytest.raises(UserError, match=r"1 part of 3 not whole: 2/3 \(cut short\)"):
        join(tmp_path / "out")
    monkeypatch.setattr(blocks.BlockMaker, "make", _only_from(192, blocks.BlockMaker.make))
    assert part(tmp_path / "out", "2/3").rows == 71
    join(tmp_path / "out")
    assert files_of(tmp_path / "out") == wanted


def _only_from(item, make):
    def only(self, start, stop, tick):
        assert start >= item, "what is stored already is made again"
        return make(self, start, stop, tick)

    return only


def test_the_command_that_is_named_makes_the_part(tmp_path, capsys):
    """With all options that the rows depend on, quoted."""
    source = told(tmp_path / "in it", *(f"question {i}" for i in range(70)))
    options = ["--read.columns", "{question_text: question_text, answer_text: answer_text}", "--read.language", "de"]
    options += ["--question_rate", "0", "--limit", "68", "--keep_answer_audio", "true", "--workers", "0", "--shard_mb", "1"]
    options += [
        "--speak",
        "question",
        "--voice",
        "{'tests.train.data.prepare.toys:beep': 2}",
        "--speaking.silence",
        "[0.1,0.2]",
    ]
    options += ["--read.audio", "optional", "--progress", "off"]
    out = tmp_path / "out"
    assert main(["data", "prepare", str(source), str(tmp_path / "whole"), *options]) == 0
    assert main(["data", "prepare", str(source), str(out), *options, "--shard", "2/3"]) == 0
    assert f"part 2/3; once all are whole: omni-train data join {out}" in capsys.readouterr().out
    for missing in ("0/3", "1/3"):
        assert main(["data", "join", str(out)]) == 2
        said = capsys.readouterr().err
        command = re.search(rf"This makes {missing}: omni-train (.*)$", said)
        assert command and "--workers" not in said, said
        assert main([*shlex.split(command[1]), "--workers=0", "--progress=off"]) == 0
    capsys.readouterr()
    assert main(["data", "join", str(out)]) == 0
    assert capsys.readouterr().out.startswith("61 rows of 68 items in ")
    assert files_of(out) == files_of(tmp_path / "whole")


def test_parts_spoken_by_espeak(tmp_path):
    options = {"speak": "question", "codec": "", "workers": 0}
    made(tmp_path / "whole", ToySource(40, "text"), **options)
    for shard in ("1/2", "0/2"):
        made(tmp_path / "out", ToySource(40, "text"), **options, shard=shard)
    assert join(tmp_path / "out").spoken_questions == 40
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_join_that_was_cut_short_is_gone_on_with(at, tmp_path, monkeypatch, short):
    wanted = whole(tmp_path / "whole")
    for number in range(3):
        part(tmp_path / "out", f"{number}/3")
    write, done = shards.write_json, []

    def until(path, data, **more):
        if len(done) == at and Path(path).parent.name == "notes":
            raise KeyboardInterrupt
        done.append(path) if Path(path).parent.name == "notes" else None
        write(path, data, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "write_json", until)
        join(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    join(tmp_path / "out")
    assert files_of(tmp_path / "out") == wanted


def test_parts_from_other_places_and_without_links(tmp_path, monkeypatch, short):
    """Each in a folder of its own, on disks between which nothing can be linked; the parts stay as they were."""
    wanted = whole(tmp_path / "whole")
    for number, name in enumerate("ab"):
        part(tmp_path / name, f"{number}/2")
    folders = [tmp_path / "b.parts" / "00001-of-00002", tmp_path / "a.parts" / "00000-of-00002"]
    before = [files_of(folder) for folder in folders]

    def other_disk(*names):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    with pytest.raises(UserError, match=r"1 part of 2 not whole: 1/2 \(not begun\)"):
        join(tmp_path / "out", folders[1:])
    with pytest.raises(UserError, match="are both part 1/2"):
        join(tmp_path / "out", [folders[0], *folders])
    with pytest.raises(UserError, match="whole is no part of a preparation"):
        join(tmp_path / "out", [*folders, tmp_path / "whole"])
    with pytest.raises(UserError, match="nowhere"):
        join(tmp_path / "out", [*folders, tmp_path / "nowhere"])
    join(tmp_path / "out", folders)
    assert files_of(tmp_path / "out") == wanted and [files_of(folder) for folder in folders] == before


def test_parts_of_other_settings_or_data_are_refused_with_the_difference(tmp_path):
    part(tmp_path / "out", "0/2")
    with pytest.raises(UserError, match=r"00000-of-00002 was started with other settings: limit was 0 and is now 90; give the"):
        part(tmp_path / "out", "1/2", limit=90)
    with pytest.raises(UserError, match=r"00000-of-00002 is of 2 parts, and --shard 1/3 of 3: give --shard i/2, or remove"):
        part(tmp_path / "out", "1/3")
    assert [place.name for place in (tmp_path / "out.parts").iterdir()] == ["00000-of-00002"]
    part(tmp_path / "other", "1/2", limit=90)
    folders = [tmp_path / "out.parts" / "00000-of-00002", tmp_path / "other.parts" / "00001-of-00002"]
    with pytest.raises(UserError, match=r"00001-of-00002 was prepared with other settings: limit was 90 and in \S+00002 is 0"):
        join(tmp_path / "new", folders)
    source, config = told(tmp_path / "in", *"abc"), [PrepareConfig(workers=0, shard=f"{number}/2") for number in range(2)]
    prepare(source, tmp_path / "first", config[0])
    told(source, *"abcdef")
    prepare(source, tmp_path / "second", config[1])
    changed = [tmp_path / "first.parts" / "00000-of-00002", tmp_path / "second.parts" / "00001-of-00002"]
    with pytest.raises(
        UserError, match=r"00001-of-00002 was prepared before \S+in changed: source_files was 1 .* and in \S+00000-of-00002 is"
    ):
        join(tmp_path / "new", changed)
    assert not list(tmp_path.glob("new*"))


def test_two_preparations_into_one_place_are_kept_apart(tmp_path, monkeypatch):
    work = tmp_path / "out.parts" / "00001-of-00002.preparing"
    part(tmp_path / "out", "0/2")
    with locked(work):
        with pytest.raises(UserError, match=rf"preparing is in use: process {os.getpid()} on .*wait for it"):
            part(tmp_path / "out", "1/2")
        (work / "settings.json").write_bytes(
            (work.with_name("00000-of-00002") / "settings.json").read_bytes().replace(b"0/2", b"1/2")
        )
        with pytest.raises(
            UserError, match=rf"not whole: 1/2 \(\S+preparing is in use: process {os.getpid()} on [^;]*\)\. This"
        ):
            join(tmp_path / "out")
    with pytest.raises(UserError, match=r"out\.parts holds parts of this output.*omni-train data join"):
        made(tmp_path / "out", Plain(), codec="")
    part(tmp_path / "out", "1/2")
    with locked(tmp_path / "out.preparing"), pytest.raises(UserError, match=rf"in use: process {os.getpid()}\b"):
        join(tmp_path / "out")
    (tmp_path / "other.preparing").mkdir()
    with locked(tmp_path / "other.preparing"), pytest.raises(UserError, match=rf"in use: process {os.getpid()}\b"):
        part(tmp_path / "other", "0/2")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(blocks.BlockMaker, "make", _interrupted_at(192, blocks.BlockMaker.make))
        made(tmp_path / "other", Plain(), codec="")
    with pytest.raises(UserError, match=r"other\.preparing holds what was prepared without --shard"):
        part(tmp_path / "other", "0/2")
    assert not (tmp_path / "other.parts").exists()


def test_damaged_parts_are_refused(tmp_path):
    for number in range(2):
        part(tmp_path / "out", f"{number}/2")
    place = tmp_path / "out.parts" / "00001-of-00002"
    file = place / "rows-00000.parquet"
    content = file.read_bytes()
    os.truncate(file, 100)
    with pytest.raises(UserError, match=r"rows-00000\.parquet has 100 bytes.*remove .*00001-of-00002"):
        join(tmp_path / "out")
    file.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(UserError, match=r"rows-00000\.parquet is damaged, its CRC-32.*remove .*00001-of-00002 and make this"):
        join(tmp_path / "out")
    file.write_bytes(content)
    shutil.move(place / "notes", tmp_path / "notes")
    with pytest.raises(UserError, match=r"00001-of-00002 lacks items 96 to 199"):
        join(tmp_path / "out")
    shutil.move(tmp_path / "notes", place / "notes")
    assert join(tmp_path / "out").rows == 196


def test_a_part_without_rows(tmp_path):
    """Broken items alone are no reason to stop a part; an output of no row at all is refused as without parts."""
    source = Plain(100, tuple(range(32, 100)))
    wanted = whole(tmp_path / "whole", source)
    assert [part(tmp_path / "out", f"{number}/3", source).rows for number in range(3)] == [32, 0, 0]
    join(tmp_path / "out")
    assert files_of(tmp_path / "out") == wanted
    none = Plain(64, tuple(range(64)))
    with pytest.raises(UserError, match="none of the first 64 items"):
        part(tmp_path / "none", "0/1", none)
    assert not (tmp_path / "none.parts").exists()
    for number in range(2):
        part(tmp_path / "none", f"{number}/2", none)
    with pytest.raises(UserError, match="64 items and none makes a row"):
        join(tmp_path / "none")


@pytest.mark.parametrize(
    ("shard", "line"),
    [
        ("2", "shard '2' is not written as 3/16"),
        ("-1/2", "shard '-1/2' is not written as 3/16"),
        ("a/b", "is not written as 3/16"),
        ("2/2", "shard '2/2' is none of 2: they are counted from 0 on"),
        ("0/0", "shard '0/0' is none of 0"),
        ("0/100001", "shard '0/100001' is one of 100,001 parts: make at most 100,000"),
    ],
)
def test_a_shard_that_is_none(shard, line, tmp_path):
    with pytest.raises(UserError, match=line):
        part(tmp_path / "out", shard)
    assert not list(tmp_path.iterdir())


def test_nothing_to_join(tmp_path):
    with pytest.raises(UserError, match=r"out\.parts holds no part: make them by `omni-train data prepare SOURCE"):
        join(tmp_path / "out")
    with pytest.raises(UserError, match="s3://"):
        join("s3://bucket/out")
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
