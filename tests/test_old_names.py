"""Old names: files with them are read, and what a user types with them is refused with the new one."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from omni.config import ModelConfig, from_dict, preset, to_dict
from omni.edit.config import MendConfig
from omni.edit.deltas import Delta, Edits
from omni.edit.mend import Mend, load_mend, save_mend
from omni.edit.storage import load_edits, save_edits
from omni.errors import UserError
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.lora.peft import load_adapter, save_adapter
from omni.lora.weights import base_checksum, weights_of
from omni.model.speech_model import SpeechModel
from omni.old_names import first_name, new_name
from omni.patterns import match_names
from tests.golden.toys import at_first, shrunk
from train.cli import main
from train.config.parse import read_fit_config
from train.config.run import completed, plain_config
from train.edit.config import EditFitConfig
from train.edit.fit import _agrees, _facts

NAMES = [
    ("adapter.project.weight", "projector.project.weight"),
    ("adapter.*", "projector.*"),
    (r"re:adapter\.project\..*", r"re:projector\.project\..*"),
    ("model.adapter.project.lora.default.a", "model.projector.project.lora.default.a"),
    ("optimizer.adapter.project.weight.exp_avg", "optimizer.projector.project.weight.exp_avg"),
    ("mend.transforms.adapter#project.0.u", "mend.transforms.projector#project.0.u"),
]


@pytest.mark.parametrize("old, new", NAMES)
def test_names_go_both_ways(old: str, new: str) -> None:
    assert new_name(old) == new_name(new) == new and first_name(new) == first_name(old) == old


@pytest.mark.parametrize("name", ["adapter", "adapters.x", "decoder.adapter.x", "runs/adapter.x", "", "\n", "*adapter.*"])
def test_other_names_stay(name: str) -> None:
    assert new_name(name) == first_name(name) == name


@pytest.fixture
def model() -> SpeechModel:
    return SpeechModel(from_dict(ModelConfig, shrunk(to_dict(preset("nano")))))


LINEAR = "projector.project.0"


def test_a_peft_folder_with_old_names_is_read_and_its_checksum_holds(model: SpeechModel, tmp_path: Path) -> None:
    chosen = add_adapter(model, LoRAConfig(("projector.*", "decoder.blocks.0.mlp.up"), rank=2))
    assert LINEAR in chosen
    weights = weights_of(model, model.state_dict(), base=base_checksum(model, chosen))
    save_adapter(tmp_path / "a", weights)
    with safe_open(tmp_path / "a/adapter_model.safetensors", "pt") as file:
        notes = file.metadata()
        tensors = {at_first(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    assert any(".adapter.project.0." in name for name in tensors)
    save_file(tensors, tmp_path / "a/adapter_model.safetensors", notes)
    settings = tmp_path / "a/adapter_config.json"
    settings.write_text(json.dumps(at_first(json.loads(settings.read_text()))))
    found = load_adapter(tmp_path / "a")
    assert found.pairs.keys() == weights.pairs.keys() and found.base == weights.base == base_by_hand(model, chosen)
    for name, (a, b, scale) in found.pairs.items():
        assert a.equal(weights.pairs[name][0]) and b.equal(weights.pairs[name][1]) and scale == weights.pairs[name][2]


def base_by_hand(model: SpeechModel, names: list[str]) -> int:
    """The checksum that files of before hold: of names that start with `adapter`."""
    value = 0
    for name in sorted(name.replace("projector.", "adapter.") for name in names):
        weight = model.get_submodule(name.replace("adapter.", "projector.")).weight
        crc = zlib.crc32(weight.detach().bfloat16().view(torch.int16).numpy().tobytes(), zlib.crc32(name.encode()))
        value = zlib.crc32(f"{name} {crc};".encode(), value)
    return value


def test_edits_and_editors_with_old_names_are_read(model: SpeechModel, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mend = Mend.of(model, [LINEAR, "decoder.blocks.0.mlp.up"], MendConfig(shared=False))
    mend.tie(model)
    save_mend(tmp_path / "m", mend)
    shape = mend.shapes[LINEAR]
    edits = Edits({LINEAR: Delta(torch.randn(2, shape[1]), torch.randn(2, shape[0]))}).signed(model)
    save_edits(tmp_path / "e", edits)
    for kind, folder in (("mend", "m"), ("edits", "e")):
        file, facts = tmp_path / folder / f"{kind}.safetensors", tmp_path / folder / f"{kind}.json"
        save_file({at_first(name).replace("projector#", "adapter#"): t for name, t in load_file(file).items()}, file)
        assert "adapter" in str(list(load_file(file)))
        stamp = {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
        facts.write_text(json.dumps(at_first(json.loads(facts.read_text())) | {"tensors": stamp}))
    found = load_mend(tmp_path / "m")
    assert found.shapes == mend.shapes and found.base == mend.base
    for name, tensor in mend.state_dict().items():
        assert found.state_dict()[name].equal(tensor), name
    read = load_edits(tmp_path / "e", model)  # refuses what other weights than the model's were signed for
    assert read.deltas[LINEAR].b.equal(edits.deltas[LINEAR].b)


def test_a_stored_configuration_has_old_keys_and_patterns() -> None:
    config, _ = read_fit_config(["configs/nano.yaml", "--trainable", "[projector.*]", "--model.projector", "{hidden: 8}"])
    new = plain_config(config)
    old = new | {"trainable": ["adapter.*"], "model": {key: new["model"][key] for key in new["model"] if key != "projector"}}
    old["model"]["adapter"] = {"hidden": 8}
    old["data"] = {**new["data"], "sound_anew": old["data"]["augment_cached_audio"]}
    del old["data"]["augment_cached_audio"]
    assert completed(old) == new
    placed = {"data": {**new["data"], "cache": "adapter.v2"}}
    assert completed(old | placed) == new | placed  # a file's name is no pattern


def test_an_editor_s_checkpoint_with_old_names_agrees_with_its_run() -> None:
    config = EditFitConfig("model", "out", linears=("projector.*",))
    old = repr(_facts(config)).replace("'augment_cached_audio'", "'sound_anew'").replace("projector.*", "adapter.*")
    assert "sound_anew" in old and "'adapter.*'" in old
    assert _agrees(old, config) and _agrees(old, replace(config, steps=7))
    assert not _agrees(old, replace(config, lr=0.5)) and not _agrees("None", config)


@pytest.mark.parametrize(
    "words, said",
    [
        ("fit configs/nano.yaml --model.adapter {hidden: 8}", "it is now called --model.projector: give that instead"),
        ("fit configs/nano.yaml --model.adapter.hidden 8", "it is now called --model.projector: give that instead"),
        ("fit old.yaml", "old.yaml: unknown key model.adapter; it is now called model.projector: give that instead"),
        ("fit configs/nano.yaml --trainable [adapter.*]", "'adapter.*' matches no parameter; it is now called 'projector.*'"),
        ("fit configs/nano.yaml --data.sound_anew false", "it is now called --data.augment_cached_audio: give that instead"),
    ],
)
def test_what_is_typed_is_refused_with_its_new_name(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(Path("configs").resolve())
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text("model: {preset: nano, adapter: {hidden: 8}}\nbudget: {steps: 1}\n")
    command, place, *rest = words.split(" ")
    argv = [*rest[:1], " ".join(rest[1:])] if command == "fit" and rest else rest
    assert main([command, place, *argv]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_old_names_in_python(model: SpeechModel) -> None:
    with pytest.raises(AttributeError, match=r"SpeechModel\.adapter is now called projector"):
        _ = model.adapter
    assert not hasattr(model, "adapter") and not hasattr(model, "xyzzy")
    with pytest.raises(UserError, match="'adapter'.*'projector'"):
        from_dict(ModelConfig, {"adapter": {}})
    assert from_dict(ModelConfig, {"adapter": {"stack": 2}}, stored=True).projector.stack == 2
    with pytest.raises(UserError, match=r"it is now called 'projector\.x'"):
        match_names(["adapter.x"], ["projector.y"], "trainable")
