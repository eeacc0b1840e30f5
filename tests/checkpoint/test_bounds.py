"""Folders that claim too much are refused before anything is made of them, and what they list is listed and lies inside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.checkpoint import folder as module
from omni.checkpoint import tensors as bounds
from omni.checkpoint.folder import load_folder, read_config, save_folder
from omni.checkpoint.places import CONFIG, TOKENIZER, WEIGHTS
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.convert import omni_folder as streamed
from omni.convert.lazy import FLOATS
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.files import read_json
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.checkpoint.test_folder import edit

CONFIGURATION = ModelConfig(
    Layout.preset("codec2"),
    WhisperConfig(width=16, heads=2, layers=2, window_seconds=2.0),
    ProjectorConfig("ltb"),
    DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48, post_layers=1),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / "model"
    torch.manual_seed(0)
    save_folder(place, CONFIGURATION, SpeechModel(CONFIGURATION).state_dict(), Tokenizer.bytes())
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "model")


def refused(place: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both readers, and before the weights are read."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("that was too late")

    for what in ("load_file", "crc32_of"):
        monkeypatch.setattr(module, what, never)
    for read in (load_folder, streamed.read):
        with pytest.raises(UserError, match=says):
            read(place)


@pytest.mark.parametrize(
    "part, change, says",
    [
        ("decoder", {"layers": 10**6}, "decoder.layers is 1000000; it must be less than or equal to 1000"),
        ("decoder", {"layers": 100}, r"tensor decoder.blocks.2.\S+ is missing"),
        ("decoder", {"heads": 4096, "head_dim": 256}, r"q.weight has shape \[32, 32\].* \[1048576, 32\]"),
        ("encoder", {"window_seconds": 3000}, r"positional_embedding has shape \[100, 16\].* \[150000, 16\]"),
        ("projector", {"settings": {"layers": 10**6}}, "projector.settings.layers is 1000000; .* whole number from 1 to 1000"),
        ("stream", {"delay": 10**9}, "layout.streams.0.delay is 1000000000; it must be less than or equal to 10000"),
        ("stream", {"delay": 2048}, "a stream's delay is 2048, but decoder.context is 2048; it must be less"),
        ("stream", {"size": 1 << 40}, "layout.streams.0.size is 1099511627776; it must be less than or equal to 268435456"),
        ("stream", {"size": 1 << 20},
         r"audio_embedding.weight has shape \[1136, 32\], the configuration asks for \[\d{7}, 32\]"),
    ],
)  # fmt: skip
def test_more_than_the_weights_hold_is_refused_at_once(
    place: Path, part: str, change: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(place, lambda c: (c["model"]["layout"]["streams"][0] if part == "stream" else c["model"][part]).update(change))
    refused(place, says, monkeypatch)


def test_streams_and_delays_have_bounds(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(place, lambda c: c["model"]["layout"].update(streams=c["model"]["layout"]["streams"] * 2000))
    refused(place, "layout.streams is .* it must be .*at most 256", monkeypatch)
    with pytest.raises(UserError, match="at most 256"):
        Layout.build([8] * 256, 8)


@pytest.mark.parametrize("nested", ["[", '{"a": '])
@pytest.mark.parametrize("levels", [101, 900, 200_000])
def test_a_deep_configuration_is_one_clear_error(place: Path, nested: str, levels: int) -> None:
    end = {"[": "]", '{"a": ': "}"}[nested]
    inner = nested * levels + ("" if nested == "[" else "1") + end * levels
    text = (place / CONFIG).read_text().replace('"extra": {}', f'"extra": {{"x": {inner}}}')
    (place / CONFIG).write_text(text)
    for read in (load_folder, read_config, streamed.read, lambda folder: read_json(folder / CONFIG)):
        with pytest.raises(UserError, match="is nested more than 100 deep"):
            read(place)  # type: ignore[operator]


def test_a_configuration_without_end_is_not_read(place: Path) -> None:
    with (place / CONFIG).open("a") as file:
        file.write(" " * module.LONGEST)
    with pytest.raises(UserError, match=r"bytes, and at most 16000000 are read"):
        load_folder(place)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.update(files={}), "files does not list model.safetensors, whose checksum it must hold"),
        (lambda c: c["files"].pop(TOKENIZER), "files does not list tokenizer.json"),
        (lambda c: c["files"].update({"../../etc/passwd": {"bytes": 1, "crc32": 1}}), "'../../etc/passwd' lies outside"),
        (lambda c: c["files"].update({"/etc/passwd": {"bytes": 1, "crc32": 1}}), "'/etc/passwd' lies outside"),
        (lambda c: c["files"].update({"out/secret": {"bytes": 1, "crc32": 1}}), "'out/secret' lies outside"),
        (lambda c: c["files"].update({"a\0b": {"bytes": 1, "crc32": 1}}), "lies outside"),
        (lambda c: c["files"].update({"loop": {"bytes": 1, "crc32": 1}}), "loop"),
    ],
)
def test_files_are_listed_and_lie_inside(place: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    (place.parent / "elsewhere").mkdir()
    (place.parent / "elsewhere" / "secret").write_text("x")
    (place / "out").symlink_to(place.parent / "elsewhere")
    (place / "loop").symlink_to("loop")
    edit(place, change)
    for read in (load_folder, streamed.read):
        with pytest.raises(UserError, match=says):
            read(place)


def test_a_snapshot_of_a_cache_links_to_its_blobs(made: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--us--omni" / "snapshots" / "abc", tmp_path / "models--us--omni" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in made.iterdir():
        shutil.copy(file, blobs / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"sha-{file.name}"))
    load_folder(snapshot)
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(made / WEIGHTS)
    with pytest.raises(UserError, match="'model.safetensors'.*outside"):
        load_folder(snapshot)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["decoder.blocks.1.mlp.down.weight", "encoder.whisper.ln_post.bias"])
def test_weights_that_are_not_finite_are_refused_by_name(made: Path, tmp_path: Path, name: str, value: float) -> None:
    state = {key: tensor.clone() for key, tensor in load_folder(made).model.state_dict().items()}
    state[name].view(-1)[3] = value
    save_folder(tmp_path / "odd", CONFIGURATION, state, Tokenizer.bytes())
    with pytest.raises(UserError, match=rf"model.safetensors.*{name}.*not finite"):
        SpeechLM.from_pretrained(tmp_path / "odd")


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float64))
def test_large_numbers_are_finite(dtype: torch.dtype) -> None:
    large = torch.full((3, 50), torch.finfo(dtype).max, dtype=dtype)
    assert bounds.finite(large) and bounds.finite(-large) and bounds.finite(large[:0])
    for value in (float("nan"), float("inf"), -float("inf")):
        odd = large.clone()
        odd[1, 7] = value
        assert not bounds.finite(odd)
    assert not bounds.finite(torch.tensor([float("inf"), -float("inf"), 1.0], dtype=dtype))


def test_weights_that_do_not_fit_the_type_are_refused(made: Path, tmp_path: Path) -> None:
    state = load_folder(made).model.state_dict()
    state["decoder.norm.weight"] = torch.full((32,), 1e6)
    save_folder(tmp_path / "large", CONFIGURATION, state, Tokenizer.bytes())
    load_folder(tmp_path / "large", dtype=torch.bfloat16)
    with pytest.raises(UserError, match="decoder.norm.weight.*torch.float16"):
        load_folder(tmp_path / "large", dtype=torch.float16)
