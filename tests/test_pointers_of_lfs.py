"""Pointers of Git LFS, which a clone without `git lfs` leaves in place of large files, are told as such at every door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.jsonl.gz", "a.csv.gz", "a.parquet"])
def test_data_files(tmp_path, name):
    with pytest.raises(UserError, match=TOLD):
        list(open_source(pointer(tmp_path / name)))
    if name.endswith("parquet"):
        with pytest.raises(UserError, match=TOLD):
            StoredRows(tmp_path)[0]


def test_shards(tmp_path):
    for name in ("a.tar", "a.parquet"):
        with pytest.raises(UserError, match=TOLD):
            list(read_shard(pointer(tmp_path / name)))


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


@pytest.mark.parametrize("read", [read_safetensors, read_torch, read_json, read_settings, Tokenizer.from_file, read_yaml])
def test_files_of_other_projects(tmp_path, read):
    with pytest.raises(UserError, match=TOLD):
        read(pointer(tmp_path / "file"))


@pytest.mark.parametrize("codec", ["snac", "mimi"])
def test_files_of_codecs(tmp_path, codec):
    pointer(tmp_path / "config.json")
    with pytest.raises(UserError, match=TOLD):
        load_codec(codec, tmp_path)
