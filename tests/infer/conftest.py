"""A model folder of a few kilobytes with random weights, which never ends an answer by itself, and ways to call the CLI."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from infer.__main__ import main
from infer.bench.random_model import silence_ends
from omni.checkpoint.folder import save_folder
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.lora.peft import save_adapter, weights_of
from omni.model.linears import base_checksum
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

ROOT = Path(__file__).parents[2]

TINY = ModelConfig(
    layout=Layout.preset("codec2"),
    encoder=WhisperConfig(width=32, heads=2, layers=1),
    projector=ProjectorConfig("linear", stack=2),
    decoder=DecoderConfig(width=32, layers=2, heads=2, kv_heads=1, mlp_width=64, context=512),
)


def tiny_model(seed: int = 0) -> SpeechModel:
    """Random weights, large enough that what was asked matters, and that `end` is seldom drawn."""
    torch.manual_seed(seed)
    model = SpeechModel(TINY).eval().requires_grad_(False)
    for p in model.parameters():
        if p.ndim >= 2:
            p.mul_(4)
    for head in (model.decoder.text_weight, model.decoder.audio_head.weight):
        head.mul_(7)
    silence_ends(model)
    return model


def turn_model(voice: float, end: float) -> SpeechModel:
    """A model of a streaming encoder, whose turn head gives these logits for every frame."""
    config = replace(TINY, encoder=replace(TINY.encoder, mode="chunked", chunk_ms=160), turn=True)  # type: ignore[type-var]
    torch.manual_seed(0)
    model = SpeechModel(config).eval()
    torch.nn.init.zeros_(model.turn_head.weight)
    model.turn_head.bias.data[:] = torch.tensor([voice, end])
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    save_folder(place, TINY, tiny_model().state_dict(), Tokenizer.bytes())
    return place


@pytest.fixture(scope="session")
def lm(folder) -> SpeechLM:
    return SpeechLM.from_pretrained(folder)


def write_question(path: Path, seconds: float = 0.6, seed: int = 0, rate: int = 16000, subtype: str = "PCM_16") -> Path:
    noise = np.random.default_rng(seed).normal(0, 0.1, round(seconds * rate)).astype(np.float32)
    soundfile.write(path, noise, rate, subtype=subtype)
    return path


def write_adapter(place: Path, seed: int) -> None:
    """An adapter of the tiny model."""
    model = tiny_model()
    base = base_checksum(model, add_adapter(model, LoRAConfig(rank=2)))
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith(".b"):
            p.data.normal_(std=0.5)
    save_adapter(place, weights_of(model, model.state_dict(), base=base))


def in_file(folder: Path, **values: object) -> list[str]:
    """Words that name a file with these values, which is written beside the folder."""
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(json.dumps(values))
    return ["--config", str(file)]


@dataclass(frozen=True)
class Done:
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()


@pytest.fixture
def run(folder, tmp_path, monkeypatch, capsysbinary):
    """Run a command line in an empty folder, with the tiny model unless it names another; what it printed and returned."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Done:
        line = [str(w) for w in words]
        if line[:1] in (["ask"], ["chat"]) and "--model" not in line:
            line += ["--model", str(folder)]
        capsysbinary.readouterr()
        code = main(line)
        out, err = capsysbinary.readouterr()
        return Done(code, out, err.decode())

    return call
