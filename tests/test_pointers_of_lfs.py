"""Pointers of Git LFS, which a clone without `git lfs` leaves in place of large files, are told as such at every door."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni.checkpoint.folder import load_folder
from omni.checkpoint.tensors import read_safetensors, read_torch
from omni.codec.registry import load_codec
from omni.convert.mini_omni import read_settings
from omni.errors import UserError
from omni.files import read_json
from omni.pretrained import find_model
from omni.text import Tokenizer
from omni.utils.configuration import read_yaml
from tests.train.data.readers.toys import write_tone
from train.data.readers import Broken, open_source
from train.data.readers.containers import read_shard
from train.data.rows.parquet import StoredRows

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 12345\n"
TOLD = "a pointer of Git LFS: `git lfs pull`"


def pointer(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(POINTER)
    return path


READS: dict[str, Callable[[Path], Any]] = {
    **{
        name: lambda file: list(open_source(file))
        for name in ("a.csv", "a.tsv", "a.jsonl", "a.json", "a.jsonl.gz", "a.csv.gz", "a.parquet")
    },
    "rows/a.parquet": lambda file: StoredRows(file.parent)[0],
    **{f"shards/{name}": lambda file: list(read_shard(file)) for name in ("a.tar", "a.parquet")},
    **{f"{codec}/config.json": lambda file: load_codec(file.parent.name, file.parent) for codec in ("snac", "mimi")},
    **{"a.safetensors": read_safetensors, "a.pt": read_torch, "config.json": read_json, "model_config.yaml": read_settings},
    **{"tokenizer.json": Tokenizer.from_file, "a.yaml": read_yaml},
}


@pytest.mark.parametrize("name", READS)
def test_a_file_is_told_as_a_pointer(tmp_path, name):
    with pytest.raises(UserError, match=TOLD):
        READS[name](pointer(tmp_path / name))


def test_recordings_and_what_lies_beside_them(tmp_path):
    pointer(tmp_path / "q.wav")
    pointer(tmp_path / "units.npy")
    write_tone(tmp_path / "a.wav")
    asked = [{"from": "human", "value": "<audio>"}, {"from": "gpt", "value": "yes"}]
    rows = [{"conversations": asked, "audio": "q.wav"}, {"conversations": asked, "audio": "a.wav", "units": "units.npy"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    found = list(open_source(tmp_path / "a.json"))
    assert all(isinstance(item, Broken) and TOLD in item.why for item in found), found


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_of_a_model_folder(tmp_path, name):
    folder = shutil.copytree(find_model("nano"), tmp_path / "model")
    pointer(folder / name)
    with pytest.raises(UserError, match=TOLD):
        if name == "tokenizer.json":
            Tokenizer.from_file(folder / name)
        else:
            load_folder(folder)
