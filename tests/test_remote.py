"""Addresses of stores and servers are told from paths; where they are not read, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.checks import check_answer_file, check_file, check_model
from omni.audio.io import read_audio
from omni.codec.registry import load_codec
from omni.edit.storage import read_tensors
from omni.errors import UserError
from omni.files import real_place
from omni.generate.speech_lm import SpeechLM
from omni.lora.peft import load_adapter
from omni.text import Tokenizer
from omni.utils.remote import refuse_remote, spelled
from train.convert.convert import open_foreign
from train.data.inspect.checks import BadSound, load
from train.data.inspect.scan import Scan
from train.data.readers import ReaderOptions, open_source
from train.data.readers.files import Files
from train.data.rows.parquet import StoredRows
from train.data.rows.row import Sound, inside
from train.edit.facts import read_facts
from train.eval.questions import open_data

DOORS: dict[str, Callable[[str], Any]] = {
    "a model to convert": lambda name: open_foreign(Path(name)),
    "a place to write": real_place,
    "a codec": lambda name: load_codec("snac", name),
    "a tokenizer": Tokenizer.from_file,
    "an adapter": load_adapter,
    "edits": lambda name: read_tensors(Path(name), "edits"),
    "a sound file": read_audio,
    "a question on the command line": check_file,
    "an answer on the command line": lambda name: check_answer_file(name, []),
    "a stored row's recording": lambda name: Sound(path=name, folder=Path("/")).load(16000),
    "a set's recordings": lambda name: Files.of(Path("set.csv"), ReaderOptions(folder=name)),
    "a set's recording": lambda name: Files(Path("/")).file(name),
    "facts": lambda name: read_facts(Path(name), Tokenizer.bytes()),
}
READ: dict[str, Callable[[str], Any]] = {
    "a model folder": SpeechLM.from_pretrained,
    "a model folder, as a path": lambda name: SpeechLM.from_pretrained(Path(name)),
    "a model on the command line": check_model,
    "a data set": open_source,
    "rows": StoredRows,
    "rows to be checked": Scan,
    "questions": lambda name: open_data(Path(name), ReaderOptions()),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_address_is_told_with_the_way_out(door: str) -> None:
    with pytest.raises(UserError, match="'s3://bucket/a/b'.*s3://.* not (read|written)"):
        DOORS[door]("s3://bucket/a/b")


@pytest.mark.parametrize("door", READ)
def test_an_address_that_cannot_be_read_is_told(door: str) -> None:
    with pytest.raises(UserError, match="^s4://bucket/a/b: addresses that start with s4:// are not read; did you mean 's3'"):
        READ[door]("s4://bucket/a/b")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://b/x", r"copy it here first \(`aws s3 cp`\), and name the copy"),
        ("gs://b/x", "`gcloud storage cp`"),
        ("https://huggingface.co/o/n", "`hf download`"),
        (Path("s3://b/x"), r"data 's3://b/x' is not"),
        ("s3://b/" + "x" * 5000, r"x\.\.\.' is not"),
    ],
)
def test_each_scheme_has_its_way(address: str | Path, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        refuse_remote(address, "data")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("name", ["a/b", "/a/b", "C:/a", "s3", "s3:", "s3:b", "a b://c", "://", "say s3://b", "nought:///"])
def test_paths_are_none(name: str) -> None:
    refuse_remote(name, "data")


def test_addresses_are_spelled_with_both_slashes(tmp_path: Path) -> None:
    assert [spelled(word) for word in (Path("s3://b/x"), "s3://b/x", Path("a/b"), 3)] == ["s3://b/x", "s3://b/x", "a/b", "3"]
    (here := tmp_path / "s3:" / "b").mkdir(parents=True)
    assert spelled(here) == str(here)


def test_what_is_here_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "s3:" / "b").mkdir(parents=True)
    refuse_remote("s3://b", "data", tmp_path)
    assert inside(tmp_path, "s3:/b") == (tmp_path / "s3:" / "b").resolve()


def test_a_recording_elsewhere_is_missing_and_not_outside(tmp_path: Path) -> None:
    with pytest.raises(BadSound, match="'https://x.org/a.wav'") as error:
        load(Sound(path="https://x.org/a.wav", folder=tmp_path))
    assert error.value.kind == "missing_reference"
