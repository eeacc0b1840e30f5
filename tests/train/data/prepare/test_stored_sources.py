"""Data sets at addresses: brought into the cache, prepared as from a folder, and known by their address."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from omni.stores.reading import local_path
from tests.golden.toys import write_table
from train.data.prepare.cluster import BlockActor
from train.data.prepare.config import PrepareConfig
from train.data.prepare.prepare import prepare
from train.data.prepare.worker import PreparedBlock
from train.data.readers import open_source
from train.data.readers.contract import ReaderOptions
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


@pytest.mark.parametrize("whole", [True, False])
def test_another_machine_of_a_cluster_brings_the_data_to_the_same_place(
    whole: bool, bucket: Any, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = bucket.put_all(table.parent, "set") + ("" if whole else f"/{table.name}")
    path, config = local_path(address), PrepareConfig(workers=1, read=ReaderOptions(audio="required" if whole else "none"))
    source = open_source(path, config.read)
    source.brought = path, address
    work = pickle.dumps((source, config, features().arrow_schema))
    wanted = BlockActor(work, ()).make(0, 2)
    assert isinstance(wanted, PreparedBlock) and wanted.tally.rows
    shutil.rmtree(path.parent)  # the entry of the cache
    made = BlockActor(work, ()).make(0, 2)
    assert isinstance(made, PreparedBlock) and made.tally.rows == wanted.tally.rows and path.exists()
    shutil.rmtree(path.parent)
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path / "elsewhere"))
    told = BlockActor(work, ()).make(0, 2)
    assert isinstance(told, str) and told.startswith(f"{address} is at {tmp_path / 'elsewhere'}") and str(path) in told


def test_what_lies_beside_a_file_of_a_bucket_is_not_brought(bucket: Any, table: Path, tmp_path: Path) -> None:
    address = bucket.put_all(table.parent, "set")
    with pytest.raises(UserError, match="makes a row; .* is not brought with it: give the address of its folder"):
        prepare(f"{address}/{table.name}", tmp_path / "out", PrepareConfig(workers=0))


def test_one_file_of_a_bucket_is_a_data_set(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    source = open_source(bucket.put("a.jsonl", (tmp_path / "a.jsonl").read_bytes()))
    assert source.format == "chat" and len(source) == 1
