"""`omni-infer get`: the folder is what `convert` grows of the same parts, with the projector, head and LoRA that ship."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from infer import get
from infer.__main__ import main
from omni import pretrained
from omni.checkpoint.folder import load_folder
from omni.config import ProjectorConfig
from omni.convert.parts import load_encoder, read_whisper, shorten_window
from omni.errors import UserError
from omni.lora.config import LoRAConfig
from omni.lora.peft import AdapterWeights, save_adapter
from tests.convert.hub_toys import save_text, text_model
from tests.convert.test_whisper import openai
from train.commands.models import run_convert, run_push

WORDS = [
    "--encoder_window",
    "1",
    "--codec",
    "none",
    "--projector",
    "transformer",
    "--projector_hidden",
    "24",
    "--projector_stack",
    "4",
]


def test_parts_and_what_ships_make_the_model(tmp_path, monkeypatch, capsys):
    parts = tmp_path / "parts"
    save_text(text_model("llama"), parts / "smollm")
    (parts / "whisper").mkdir()
    openai(parts / "whisper")
    (file,) = (parts / "whisper").glob("*.pt")
    file = file.rename(parts / "whisper/base.pt")
    grown = tmp_path / "grown"
    assert run_convert([str(parts / "smollm"), str(grown), "--encoder", str(file), *WORDS]) == 0

    torch.manual_seed(0)
    name = "decoder.blocks.0.attention.q"
    state = load_folder(grown).model.state_dict()
    whole = {n: torch.randn_like(t) for n, t in state.items() if n.startswith(("projector.", "alignment_head."))}
    out, width = state[f"{name}.weight"].shape
    pair = torch.randn(2, width), torch.randn(out, 2), 1.0
    save_adapter(tmp_path / "smol", AdapterWeights({name: pair}, LoRAConfig(targets=[name], rank=2, alpha=2), whole))

    monkeypatch.setattr(pretrained, "SHIPPED", tmp_path)
    monkeypatch.setattr(get, "SHIPPED", tmp_path)
    monkeypatch.setattr(get, "PROJECTOR", ProjectorConfig("transformer", hidden=24, stack=4))
    monkeypatch.setattr(get, "WINDOW", 1.0)
    monkeypatch.setattr(get, "ENCODER", load_encoder(shorten_window(read_whisper(file), 1)).fingerprint())
    assert main(["get", "smol", "--out", str(tmp_path / "got"), "--parts", str(parts)]) == 0
    assert run_convert([str(grown), str(tmp_path / "merged"), "--lora", str(tmp_path / "smol")]) == 0
    wanted, ours = (load_folder(tmp_path / name).model.state_dict() for name in ("merged", "got"))
    assert wanted.keys() == ours.keys() and all(torch.equal(wanted[name], ours[name]) for name in wanted)

    monkeypatch.chdir(parts)  # where no answer lies
    asked = ["ask", "--text", "hi", "--model", str(tmp_path / "got"), "--max_tokens", "2", "--json"]
    capsys.readouterr()
    assert main(asked) == 0
    told = capsys.readouterr()
    assert "not taught to speak" in told.err and json.loads(told.out)["task"] == "T1T2" and not Path("answer.wav").exists()
    assert main([*asked, "--task", "T1A2"]) == 2 and "got was not taught to speak; for text alone" in capsys.readouterr().err
    assert main([*asked[:3], "--model", str(parts / "smollm")]) == 2 and "by omni-train convert" in capsys.readouterr().err
    assert main(["get", "smol", "--parts", str(tmp_path)]) == 2 and "has no smollm/config.json" in capsys.readouterr().err
    assert run_push([str(tmp_path / "got"), "hf://me/got", "--license", "mit", "--dry_run"]) == 0
    card = capsys.readouterr().out
    assert "audio-text-to-text" in card and "answers in text.\n" in card and "answer.save" not in card

    kept = {"revision": get.COMMIT, "allow_patterns": ["*.json", "model.safetensors"]}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **more: str(parts / "smollm") if more == kept else "")
    monkeypatch.setattr("whisper.load_model", lambda name, device, folder: shutil.copytree(parts / "whisper", folder))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert main(["get", "smol", "--out", str(tmp_path / "not")]) == 2 and "SHA-256" in capsys.readouterr().err
    shutil.rmtree(tmp_path / ".cache")
    monkeypatch.setattr(get, "SHA256", hashlib.sha256((parts / "smollm/model.safetensors").read_bytes()).hexdigest())
    assert main(["get", "smol", "--out", str(tmp_path / "fetched")]) == 0
    assert load_folder(tmp_path / "fetched").model.state_dict().keys() == ours.keys()

    monkeypatch.setattr(get, "ENCODER", 1)
    for words, told in ((["smol"], "another Whisper"), (["smal"], "no such model")):
        assert main(["get", *words, "--out", str(tmp_path / "not"), "--parts", str(parts)]) == 2
        assert told in capsys.readouterr().err and not (tmp_path / "not").exists()
    with pytest.raises(UserError, match="omni-infer get smol"):
        pretrained.find_model("smol")
