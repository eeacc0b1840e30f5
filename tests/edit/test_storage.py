"""Edits as a folder: what was written is read, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from omni.edit.deltas import Edits
from omni.edit.storage import load_edits, save_edits
from omni.errors import UserError
from tests.edit.toys import build, some_edits


@pytest.fixture
def edits(model) -> Edits:
    dense = dict(list(some_edits(model, 2, rank=None).deltas.items())[:1])
    return Edits({**some_edits(model).deltas, **dense}).signed(model)


def test_edits_are_read_as_they_were(model, edits, tmp_path):
    save_edits(tmp_path / "edit", edits, {"question": "naïve"})
    read = load_edits(tmp_path / "edit", model)
    assert read.base == edits.base and list(read.deltas) == list(edits.deltas)
    for name, delta in edits.deltas.items():
        got = read.deltas[name]
        assert torch.equal(got.b, delta.b) and float(got.lr) == float(delta.lr)
        assert got.a is None if delta.a is None else torch.equal(got.a, delta.a)
    assert json.loads((tmp_path / "edit" / "edits.json").read_text())["extra"] == {"question": "naïve"}


def test_edits_of_other_weights_are_refused(model, name, edits, tmp_path):
    save_edits(tmp_path / "edit", edits)
    other = build(name)
    next(p for n, p in other.named_parameters() if n == f"{next(iter(edits.deltas))}.weight").data[0, 0] += 1e-2
    load_edits(tmp_path / "edit", model)
    load_edits(tmp_path / "edit", build(name).to(torch.bfloat16))
    load_edits(tmp_path / "edit")
    with pytest.raises(UserError, match=r"is held in float16, which rounds otherwise"):
        load_edits(tmp_path / "edit", build(name).to(torch.float16))
    with pytest.raises(UserError, match=r"other weights"):
        load_edits(tmp_path / "edit", other)
    with pytest.raises(UserError, match=r"not finite"):
        save_edits(tmp_path / "nan", edits.map(lambda tensor: tensor * float("nan")))
    assert not (tmp_path / "nan").exists()
    with pytest.raises(UserError, match=r"for which weights"):
        save_edits(tmp_path / "edit", some_edits(model))


@pytest.mark.parametrize("name", ["llama"])
def test_a_broken_folder_is_refused(model, edits, tmp_path):
    folder = tmp_path / "edit"
    with pytest.raises(UserError, match=r"edit does not exist; give the folder of edits"):
        load_edits(folder)
    folder.mkdir()
    with pytest.raises(UserError, match=r"has no edits.json; give the folder of edits"):
        load_edits(folder)

    def refuse(pattern: str) -> None:
        with pytest.raises(UserError, match=pattern):
            load_edits(folder)
        save_edits(folder, edits)

    save_edits(folder, edits)
    tensors, facts = folder / "edits.safetensors", folder / "edits.json"
    data = tensors.read_bytes()
    tensors.write_bytes(data[:-1])
    refuse(r"does not match its size and checksum")
    tensors.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refuse(r"does not match its size and checksum")
    tensors.unlink()
    refuse(r"cannot be read")
    entries = json.loads(facts.read_text())
    next(iter(entries["linears"].values()))["in"] = 3
    facts.write_text(json.dumps(entries))
    refuse(r"has another shape than it says")
    load_edits(folder, model)
