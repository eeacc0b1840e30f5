"""Model folders: what is written comes back, and what is broken is refused before anything runs."""

from __future__ import annotations

import errno
import json
import os
import pickle

import pytest
import torch

from omni.checkpoint import folder as module
from omni.checkpoint.folder import load_folder, read_config, save_folder
from omni.checkpoint.places import CONFIG, TOKENIZER, WEIGHTS
from omni.config import DecoderConfig, ModelConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.errors import UserError
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

CONFIGS = {
    "codec2": ModelConfig(
        Layout.preset("codec2"),
        WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0),
        decoder=DecoderConfig(width=32, layers=2, heads=4, kv_heads=2, mlp_width=48),
    ),
    "mini-omni": ModelConfig(
        Layout.preset("mini-omni", text_size=256),
        WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0),
        decoder=DecoderConfig(width=32, layers=1, heads=4, kv_heads=4, mlp_width=48, tie_text=True, post_layers=1),
        codec="snac",
    ),
}


@pytest.fixture(params=CONFIGS)
def saved(request, tmp_path):
    torch.manual_seed(0)
    model = SpeechModel(CONFIGS[request.param])
    place = tmp_path / "model"
    save_folder(place, model.config, model.state_dict(), Tokenizer.bytes(), extra={"step": 7})
    return model, place


def test_what_is_written_comes_back(saved):
    model, place = saved
    loaded = load_folder(place)
    assert loaded.config == model.config
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    for name, tensor in model.named_buffers():  # those that are not stored too
        assert torch.equal(loaded.model.get_buffer(name), tensor), name
    tokens = torch.stack([torch.randint(s.size, (1, 6)) for s in model.layout.streams], dim=1)
    assert torch.equal(loaded.model(tokens).audio, model(tokens).audio)
    assert loaded.tokenizer.encode("six") == Tokenizer.bytes().encode("six")
    assert json.loads((place / CONFIG).read_text())["extra"] == {"step": 7}
    assert sorted(p.name for p in place.parent.iterdir()) == ["model"]  # nothing was left beside it


def test_a_second_save_replaces_the_first(saved):
    model, place = saved
    with torch.no_grad():
        model.decoder.norm.weight.fill_(3.0)
    save_folder(place, model.config, model.state_dict(), Tokenizer.bytes())
    assert load_folder(place).model.decoder.norm.weight[0] == 3.0
    assert sorted(p.name for p in place.parent.iterdir()) == ["model"]


def test_a_save_through_a_link_keeps_the_link(saved, tmp_path):
    model, place = saved
    (tmp_path / "disk").mkdir()
    os.rename(place, tmp_path / "disk" / "real")
    place.symlink_to(tmp_path / "disk" / "real")
    with torch.no_grad():
        model.decoder.norm.weight.fill_(3.0)
    save_folder(place, model.config, model.state_dict(), Tokenizer.bytes())
    assert load_folder(tmp_path / "disk" / "real").model.decoder.norm.weight[0] == 3.0
    assert place.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["disk", "model"]
    os.rename(tmp_path / "disk" / "real", tmp_path / "disk" / ".real.old-123")
    with pytest.raises(UserError, match=r"does not exist.*/disk/\.real\.old-123\b"):
        load_folder(place)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        (WEIGHTS, lambda data: data[: len(data) // 2], r"model\.safetensors is truncated: \d+ bytes of \d+"),
        (TOKENIZER, lambda data: data[: len(data) // 2], r"tokenizer\.json is truncated: \d+ bytes of \d+"),
        (WEIGHTS, lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], "does not match its checksum"),
        (TOKENIZER, None, "tokenizer.json is missing"),
    ],
)
def test_a_damaged_file_is_refused(saved, file, damage, said):
    path = saved[1] / file
    data = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(data))
    with pytest.raises(UserError, match=said):
        load_folder(saved[1])


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was run",))


def edit(place, change) -> None:
    config = json.loads((place / CONFIG).read_text())
    change(config)
    (place / CONFIG).write_text(json.dumps(config))


def forge(place, data: bytes) -> None:
    """Put other weights into a folder, with a size and checksum that fit."""
    (place / WEIGHTS).write_bytes(data)
    stamp = {"bytes": len(data), "crc32": module.crc32_of(place / WEIGHTS)}
    edit(place, lambda config: config["files"].update({WEIGHTS: stamp}))


def test_a_pickle_is_refused_and_never_run(saved, tmp_path):
    _, place = saved
    for data in (pickle.dumps(Bomb(), protocol=2), torch_zip(tmp_path)):
        forge(place, data)
        with pytest.raises(UserError, match="is a pickle, which could run code"):
            load_folder(place)
    forge(place, b"no weights at all, just words, and some more of them")
    with pytest.raises(UserError, match="truncated.*safetensors"):
        load_folder(place)


def test_a_file_for_a_folder_is_called_a_file(tmp_path):
    torch_zip(tmp_path)
    with pytest.raises(UserError, match=r"old.pt is a pickle, which could run code.* give a folder with config.json"):
        load_folder(tmp_path / "old.pt")
    (tmp_path / "notes").write_text("dear diary")
    with pytest.raises(UserError, match=r"notes is a file, not a folder; give a folder"):
        load_folder(tmp_path / "notes")


def torch_zip(tmp_path) -> bytes:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "old.pt")
    return (tmp_path / "old.pt").read_bytes()


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s.pop("decoder.norm.weight"), "tensor decoder.norm.weight is missing"),
        (lambda s: s.update({"decoder.norm.weight": torch.ones(5)}), r"decoder.norm.weight has shape \[5\].* asks for \[32\]"),
        (lambda s: s.update({"stranger": torch.ones(1)}), "tensor stranger is not part"),
    ],
)
def test_weights_of_another_shape_or_layout_are_refused(saved, change, says):
    model, place = saved
    state = dict(model.state_dict())
    change(state)
    save_folder(place, model.config, state, Tokenizer.bytes())
    with pytest.raises(UserError, match=says):
        load_folder(place)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda c: c.update(format=99), "config.json: format is 99; it must be 1 or 2"),
        (lambda c: c["model"]["decoder"].update(widht=4), "unknown key decoder.widht; did you mean decoder.width"),
        (lambda c: c.update(files=[]), r"config.json: files is \[\]; it must be"),
        (lambda c: c.update(extra=None), "config.json: extra is None; it must be"),
        (lambda c: c["model"].update(codec="snak"), r"model.codec: codec 'snak' is unknown; did you mean 'snac'\?"),
    ],
)
def test_a_bad_configuration_is_refused(saved, change, says):
    _, place = saved
    edit(place, change)
    with pytest.raises(UserError, match=says):
        load_folder(place)


def test_other_places_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no config.json"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)


def test_a_tokenizer_that_does_not_fit_the_layout_is_refused(tmp_path):
    config = ModelConfig(
        Layout.build([8], 100, specials=5),
        WhisperConfig(width=16, heads=2, layers=1, window_seconds=2.0),
        decoder=DecoderConfig(width=32, layers=1, heads=4, kv_heads=4, mlp_width=48),
    )
    save_folder(tmp_path / "m", config, SpeechModel(config).state_dict(), Tokenizer.bytes())
    with pytest.raises(UserError, match="256 ids.*only 100"):
        load_folder(tmp_path / "m")


def test_a_rename_that_fails_leaves_the_old_folder(saved, monkeypatch):
    model, place = saved
    before = {p.name: p.read_bytes() for p in place.iterdir()}
    rename = os.rename

    def failing(source, target):
        if target == place and ".old-" not in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(UserError, match="cannot be written"):
        save_folder(place, model.config, model.state_dict(), Tokenizer.bytes())
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    assert sorted(p.name for p in place.parent.iterdir()) == ["model"]


def test_files_are_on_the_disk_before_they_get_their_name(saved, monkeypatch):
    model, place = saved
    steps, fsync, rename = [], os.fsync, os.rename

    def watched_fsync(handle):
        fsync(handle)
        steps.append(os.fstat(handle).st_ino)

    def watched_rename(source, target):
        rename(source, target)
        steps.append("renamed")

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    save_folder(place, model.config, model.state_dict(), Tokenizer.bytes())
    assert {p.stat().st_ino for p in (place, *place.iterdir())} == set(steps[: steps.index("renamed")])
