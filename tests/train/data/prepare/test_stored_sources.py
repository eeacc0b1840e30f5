"""Data sets at addresses: brought into the cache, prepared as from a folder, and known by their address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni.errors import UserError
from tests.golden.toys import write_table
from train.data.prepare.config import PrepareConfig
from train.data.prepare.prepare import prepare
from train.data.readers import open_source


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


def test_one_file_of_a_bucket_is_a_data_set(bucket: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    source = open_source(bucket.put("a.jsonl", (tmp_path / "a.jsonl").read_bytes()))
    assert source.format == "chat" and len(source) == 1
