"""Data sets at addresses: brought into the cache, prepared as from a folder, and known by their address."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from omni.errors import UserError
from omni.files import cache_folder
from omni.stores.cache import POINTERS
from omni.stores.tries import ChangedError, StoreError
from tests.golden.toys import write_sound, write_table
from train.data import executor
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import BlockMaker, PrepareConfig, PreparedBlock
from train.data.readers import data_path, open_source
from train.data.readers.contract import ReaderOptions
from train.data.rows.parquet import StoredRows
from train.data.rows.row import features


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of recordings, with its recordings beside it."""
    folder = tmp_path / "set"
    folder.mkdir()
    return write_table(folder)


def test_a_folder_and_a_file_of_a_bucket_are_prepared_alike(bucket: Any, table: Path, tmp_path: Path) -> None:
    config = PrepareConfig(workers=1, keep_answer_audio=True)
    here = prepare(table.parent, tmp_path / "here", config)
    address = bucket.put_all(table.parent, "set")
    there = prepare(address, tmp_path / "there", config)
    assert here.plain() == there.plain() and here.rows
    same = [(tmp_path / name / "rows-00000.parquet").read_bytes() for name in ("here", "there")]
    assert same[0] == same[1]
    report = json.loads((tmp_path / "there" / "report.json").read_text())
    assert report["source"] == address
    assert prepare(address, tmp_path / "there", config).plain() == there.plain()  # it is finished
    bucket.put(f"set/{table.name}", table.read_bytes() + b"\n")
    with pytest.raises(UserError, match=f"{address} changed"):
        prepare(address, tmp_path / "there", config)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("whole", [True, False])
def test_another_machine_of_a_cluster_brings_the_data_to_the_same_place(
    whole: bool, bucket: Any, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = bucket.put_all(table.parent, "set") + ("" if whole else f"/{table.name}")
    path, config = data_path(address), PrepareConfig(workers=1, read=ReaderOptions(audio="required" if whole else "none"))
    source = open_source(path, config.read)
    source.brought = path, address
    work = pickle.dumps(partial(BlockMaker, source, config, features().arrow_schema))

    def made() -> Any:
        return executor.ItemWorker(work, (), 1).do(range(2))

    wanted = made().result
    assert isinstance(wanted, PreparedBlock) and wanted.tally.rows
    shutil.rmtree(path.parent)  # the entry of the cache
    assert made().result.tally.rows == wanted.tally.rows and path.exists()
    shutil.rmtree(path.parent)
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "elsewhere"))
    told = made().mistake
    assert told.startswith(f"{address} is at {tmp_path / 'elsewhere'}") and str(path) in told
    monkeypatch.undo()
    if whole:  # a folder that both machines see
        path.mkdir(parents=True)
        (path.parent / POINTERS).touch()
        assert "set OMNI_CACHE to the same folder for all processes" in made().mistake


def write_spoken(folder: Path, sound: str, table: str = "", line: str = "", head: str = "") -> None:
    """Seventy recordings with a table."""
    for number in range(70):
        write_sound(folder / sound.format(number), 2000 + number, str(number))
    if table:
        (folder / table).write_text(head + "".join(line.format(number) for number in range(70)))


NEMO = '{{"audio_filepath": "{}.flac", "duration": 0.05, "offset": 0.02, "text": "said"}}\n'
SETS: dict[str, Callable[[Path], None]] = {
    "librispeech": lambda folder: write_spoken(folder / "12" / "3", "12-3-{}.flac", "12-3.trans.txt", "12-3-{} SAID\n"),
    "common-voice": lambda folder: write_spoken(
        folder, "clips/{}.flac", "train.tsv", "c\tclips/{}.flac\tsaid\n", "client_id\tpath\tsentence\n"
    ),
    "recordings": lambda folder: write_spoken(folder / "deep", "{}.flac"),
    "cuts": lambda folder: write_spoken(folder, "{}.flac", "manifest.jsonl", NEMO),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", SETS)
def test_a_part_reads_the_recordings_of_its_own_items(kind: str, bucket: Any, tmp_path: Path) -> None:
    SETS[kind](tmp_path / "set")
    address = bucket.put_all(tmp_path / "set", "set")
    source = open_source(address)
    assert source.format == kind and len(source) == 70
    before = bucket.server.seen["GET"]
    prepare(address, tmp_path / "parts", PrepareConfig(workers=0, shard="1/3"))
    assert 32 <= bucket.server.seen["GET"] - before <= 34  # a block of them, and perhaps the table again
    for recordings in ("copy", "reference"):
        config = PrepareConfig(workers=0, recordings=recordings)
        for name, path in (("here", tmp_path / "set"), ("there", address)):
            prepare(path, tmp_path / f"{name}-{recordings}", config)
    here, there = tmp_path / "here-copy", tmp_path / "there-copy"
    assert (here / "rows-00000.parquet").read_bytes() == (there / "rows-00000.parquet").read_bytes()
    known = [json.loads((folder / "settings.json").read_text())["source_files"] for folder in (here, there)]
    assert known[0] == known[1]
    named = [StoredRows(tmp_path / f"{name}-reference") for name in ("here", "there")]
    for index in (0, 40, 69):
        one, other = (rows[index].turns[0].question_audio for rows in named)
        assert one and other and str(other.path).startswith(address) and torch.equal(one.load(16000), other.load(16000))


@pytest.mark.long
def test_without_a_cache_each_recording_takes_one_request(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SETS["recordings"](tmp_path / "set")
    address = bucket.put_all(tmp_path / "set", "set")
    monkeypatch.setenv("OMNI_CACHE_GB", "0")
    bucket.server.seen.clear()
    assert prepare(address, tmp_path / "out", PrepareConfig(workers=0)).rows == 70
    assert bucket.server.seen["GET"] == 70 and not (cache_folder() / "stores" / "blocks").exists()


def test_a_part_reads_the_row_groups_of_its_own_items(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for number in range(3):
        noise = [os.urandom(40_000) for _ in range(128)]
        table = pa.table({"instruction": [f"{number} {i}" for i in range(128)], "output": ["yes"] * 128, "noise": noise})
        pq.write_table(table, tmp_path / "set" / f"{number}.parquet", row_group_size=32, compression="none")
    address = bucket.put_all(tmp_path / "set", "set")
    for part in ("1/3", "0/3", "2/3"):
        prepare(address, tmp_path / part[0], PrepareConfig(workers=0, shard=part))
        if part == "1/3":  # of 15.4 MB: a file, the start of the first and the ends
            kept = sum(file.stat().st_size for file in (cache_folder() / "stores" / "blocks").rglob("*") if file.is_file())
            assert 4e6 < kept < 10e6
    prepare(tmp_path / "set", tmp_path / "here", PrepareConfig(workers=0))
    ids = [row.id for part in "012" for row in StoredRows(tmp_path / part)]
    assert ids == [row.id for row in StoredRows(tmp_path / "here")] and len(ids) == 384


@pytest.mark.long
def test_a_store_that_fails_breaks_no_row(bucket: Any, tmp_path: Path) -> None:
    SETS["common-voice"](tmp_path / "set")
    address = bucket.put_all(tmp_path / "set", "set")
    out, config = tmp_path / "out", PrepareConfig(workers=0, shard_mb=1, read=ReaderOptions(audio="optional"))
    bucket.server.broken = lambda environ: environ["PATH_INFO"].endswith("/40.flac")
    with pytest.raises(StoreError, match=r"clips/40\.flac cannot be read: .* 6 times; check the address"):
        prepare(address, out, config)
    bucket.server.heal()
    made = prepare(address, out, config)
    assert (made.rows, made.broken, made.left_out) == (70, 0, 0)
    whole = prepare(tmp_path / "set", tmp_path / "whole", config)
    assert made == whole
    assert (out / "rows-00000.parquet").read_bytes() == (tmp_path / "whole" / "rows-00000.parquet").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["librispeech", "cuts"])
def test_a_recording_that_is_replaced_meanwhile_is_told(kind: str, bucket: Any, tmp_path: Path) -> None:
    SETS[kind](tmp_path / "set")
    address = bucket.put_all(tmp_path / "set", "set")
    source = open_source(address)
    assert len(source) == 70
    (changed,) = (key for key in map(str, bucket.keys()) if key.endswith(("-7.flac", "/7.flac")))
    bucket.put(changed, b"another")
    with pytest.raises(ChangedError, match=f"{changed} has changed, or was replaced, since it was listed: run the same"):
        list(source)


@pytest.mark.long
@pytest.mark.parametrize("audio", ["required", "optional"])
@pytest.mark.parametrize("gone", ["", "*/*"])
def test_a_cache_that_is_removed_meanwhile_breaks_no_row(audio: str, gone: str, bucket: Any, tmp_path: Path) -> None:
    SETS["common-voice"](tmp_path / "set")
    source = open_source(bucket.put_all(tmp_path / "set", "set"), ReaderOptions(audio=audio))
    assert len(source) == 70
    with pytest.raises(StoreError, match="was removed from the cache while it was read: run the same command again"):
        for number, _ in enumerate(source.iterate(0, 70)):
            if number == 20:
                for place in (cache_folder() / "stores" / "files").glob(gone) if gone else [cache_folder()]:
                    shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)


@pytest.mark.long
def test_failures_in_other_processes_are_told(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SETS["recordings"](tmp_path / "set")
    address = bucket.put_all(tmp_path / "set", "set")
    failed = []

    def broken(environ: dict[str, Any]) -> bool:
        once = environ["PATH_INFO"].endswith("/30.flac") and not failed
        failed.extend([1] * once)
        return once

    bucket.server.broken = broken
    told: list[str] = []
    monkeypatch.setattr(executor.LOG, "warning", lambda text, *values: told.append(text % values))
    assert prepare(address, tmp_path / "out", PrepareConfig(workers=2)).rows == 70
    assert [line for line in told if "30.flac was not read" in line and "again in" in line]


@pytest.mark.long
def test_a_damaged_recording_breaks_its_row_as_here(bucket: Any, tmp_path: Path) -> None:
    SETS["recordings"](tmp_path / "set")
    sound = tmp_path / "set" / "deep" / "3.flac"
    sound.write_bytes(sound.read_bytes()[:200])
    (tmp_path / "set" / "deep" / "4.flac").write_bytes(b"no sound")
    address = bucket.put_all(tmp_path / "set", "set")
    for name, path in (("here", tmp_path / "set"), ("there", address)):
        assert prepare(path, tmp_path / name, PrepareConfig(workers=0)).broken == 2
    here, there = ((tmp_path / name / "broken.csv").read_text() for name in ("here", "there"))
    assert here.replace("'", "").replace(str(tmp_path / "set"), address) == there.replace("'", "")


def test_what_lies_beside_a_file_of_a_bucket_is_not_brought(bucket: Any, table: Path, tmp_path: Path) -> None:
    address = bucket.put_all(table.parent, "set")
    with pytest.raises(UserError, match="makes a row; .* is not brought with it: give the address of its folder"):
        prepare(f"{address}/{table.name}", tmp_path / "out", PrepareConfig(workers=0))
