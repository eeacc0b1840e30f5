"""Mimi's folders: loading them by name and in the released form, and the refusal of what does not fit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MimiConfig as ReferenceConfig

from omni.codec.mimi import MimiCodec
from omni.codec.mimi_network import MimiConfig, read_config
from omni.codec.registry import load_codec
from omni.errors import UserError
from tests.codec.mimi_toys import PLAIN, Malicious, save
from tests.codec.test_codec import random_codes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(PLAIN, tmp_path)
    return tmp_path


def change(folder: Path, rule: Any) -> None:
    """Rewrites the folder's tensors: `rule(name, tensor)` gives the new one, None to leave it out."""
    path = folder / "model.safetensors"
    tensors = {name: rule(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


def edit(folder: Path, **entries: Any) -> None:
    """Changes entries of the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def refused(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        load_codec("mimi", folder)
    assert "\n" not in str(refusal.value)


def test_loading_by_name(folder: Path) -> None:
    expected = MimiCodec.from_folder(folder, codebooks=16)
    codes = random_codes(expected, 5)
    codec = load_codec("mimi-16", str(folder))
    assert codec.name == "mimi-16" and torch.equal(codec.decode(codes), expected.decode(codes))
    assert load_codec("mimi", folder).codebook_sizes == (16,) * 8
    with pytest.raises(UserError, match="mimi with 32 codebooks: this model has 16; ask for 1 to 16"):
        load_codec("mimi-32", folder)
    with pytest.raises(UserError, match="mimi needs a folder"):
        load_codec("mimi")


def test_the_released_form_of_the_config(folder: Path) -> None:
    """kyutai/mimi itself was written by an older transformers: rope_theta and frame_rate stand on their own."""
    expected = MimiCodec.from_folder(folder)
    edit(folder, rope_parameters=None, _frame_rate=None, rope_theta=10000.0, frame_rate=2000.0)
    codec = MimiCodec.from_folder(folder)
    codes = random_codes(codec, 5)
    assert torch.equal(codec.decode(codes), expected.decode(codes))
    edit(folder, rope_theta=50.0)
    assert not torch.equal(MimiCodec.from_folder(folder).decode(codes), expected.decode(codes))
    (folder / "config.json").write_text('{"model_type": "mimi"}')
    assert read_config(folder / "config.json") == MimiConfig()
    assert MimiConfig().hop * MimiConfig().latent_stride == ReferenceConfig().frame_size == 1920


def test_weights_stored_in_half_precision(folder: Path) -> None:
    change(folder, lambda name, tensor: tensor.bfloat16())
    half = MimiCodec.from_folder(folder)
    change(folder, lambda name, tensor: tensor.float())
    codes, full = random_codes(half, 5), MimiCodec.from_folder(folder)
    # Not bit for bit: some processors add up otherwise where tensors lie otherwise in memory.
    assert torch.allclose(half.decode(codes), full.decode(codes), rtol=0, atol=1e-6)


def test_weights_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:20], b"", pickle.dumps(Malicious(), protocol=2)):
        weights.write_bytes(damaged)
        refused(folder, r"model\.safetensors is (truncated or no safetensors file|a pickle)")
    weights.unlink()
    torch.save(Malicious(), folder / "pytorch_model.bin")
    refused(folder, r"model\.safetensors is missing")
    assert not (folder / "opened").exists()
