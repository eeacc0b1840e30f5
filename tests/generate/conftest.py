"""Tiny models, a codec that can be checked by hand, and a slow way to generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecStream
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.engine import intake as entering_module
from omni.generate.runner import Runner
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.lora.attach import activate, add_adapter
from omni.lora.config import LoRAConfig
from omni.lora.peft import save_adapter, weights_of
from omni.model.linears import base_checksum
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

LAYOUTS = {
    "pad": Layout.build([16, 16, 12, 14], 256, specials=8),
    "sampled": Layout.build([14] * 3, 256, specials=5, fill="sampled", features="add", delays=[1, 2, 2]),
}
SHAPES = {"full": {}, "window": {"window": 9}}
TARGETS = {"small": ("decoder.blocks.0.*",), "wide": ("encoder.*", "projector.*", "decoder.*_head", "decoder.blocks.*")}


class EchoCodec(AudioCodec):
    """25 frames a second of 4 samples; a frame's samples depend on its codes and on those of the next frame."""

    name = "echo"
    sample_rate = 100
    frame_samples = 4
    lookahead = 1

    def __init__(self, codebook_sizes: tuple[int, ...]) -> None:
        self.codebook_sizes = codebook_sizes

    def stream(self, seed: int = 0) -> CodecStream:
        return EchoStream(self)

    def _encode(self, audio: Tensor) -> Tensor:
        level = (audio[:: self.frame_samples].abs() * 5).long()
        return torch.stack([level % n for n in self.codebook_sizes])


class EchoStream(CodecStream):
    held: Tensor | None = None

    def _sound(self, codes: Tensor, after: Tensor) -> Tensor:
        weight = torch.arange(1, len(codes) + 1.0)[:, None]
        own, other = (codes * weight).sum(0), (after * weight).sum(0)
        return (own[:, None] * torch.tensor([1.0, 2, 3, 4]) + other[:, None]).flatten() / 1000

    def _push(self, codes: Tensor) -> Tensor:
        known = codes if self.held is None else torch.cat([self.held, codes], dim=1)
        self.held = known[:, -1:]
        return self._sound(known[:, :-1], known[:, 1:])

    def _finish(self) -> Tensor:
        assert self.held is not None
        return self._sound(self.held, torch.zeros_like(self.held))


def make_model(
    layout: Layout,
    seed: int = 0,
    spread: float = 0.3,
    encoder: WhisperConfig | None = None,
    projector: ProjectorConfig | None = None,
    **decoder: object,
) -> SpeechModel:
    """A random model, with weights large enough that its choices vary from step to step."""
    layout = replace(layout, talker=bool(decoder.pop("talker", False)))
    shape = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 48, "context": 512} | decoder
    config = ModelConfig(
        layout=layout,
        encoder=encoder or WhisperConfig(width=16, heads=2, layers=1),
        projector=projector or ProjectorConfig("linear", stack=2),
        decoder=DecoderConfig(**shape),  # type: ignore[arg-type]
    )
    torch.manual_seed(seed)
    model = SpeechModel(config).eval()
    with torch.no_grad():
        for p in model.decoder.parameters():
            if p.ndim > 1:
                p.normal_(std=spread)
        for stream, s in enumerate(layout.streams):  # a middling chance to end, so that answers have some length
            model.decoder.head_weight(stream)[s.size :] = 0
    return model


def make_lm(layout: Layout, **kwargs: object) -> SpeechLM:
    return SpeechLM(make_model(layout, **kwargs), Tokenizer.bytes(), EchoCodec(layout.codebook_sizes))  # type: ignore[arg-type]


def adapt(model: SpeechModel, patterns: tuple[str, ...], *names: str) -> None:
    """Adds adapters that change what is said, none of them active."""
    torch.manual_seed(1)
    for name in names:
        add_adapter(model, LoRAConfig(patterns, rank=2), name)
    for name, p in model.named_parameters():
        if ".lora." in name:
            p.data.normal_(std=0.2)
    activate(model)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture
def lm(layout: Layout) -> SpeechLM:
    return make_lm(layout)


@pytest.fixture(params=SHAPES)
def chatty(request: pytest.FixtureRequest, layout: Layout) -> SpeechLM:
    return make_lm(layout, **SHAPES[request.param])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, int]]:
    """Of each answer: the hidden state it began from (for the audio heads), and how many columns the cache held before."""
    kept, seen = [], []
    begin, pack = Runner.begin, entering_module.pack

    def watched_pack(layout: Any, columns: Any, features: Any, starts: Any) -> Any:
        kept.append(starts[0])
        return pack(layout, columns, features, starts)

    def watched_begin(self: Runner, slots: Any, hidden: Any, starts: Any) -> Any:
        seen.append((hidden.audio[0, -1].clone(), kept[-1]))
        return begin(self, slots, hidden, starts)

    monkeypatch.setattr(entering_module, "pack", watched_pack)
    monkeypatch.setattr(Runner, "begin", watched_begin)
    return seen


@pytest.fixture
def folders(layout: Layout, tmp_path: Path) -> Path:
    """Folders of adapters (`TARGETS`) that were trained beside the model in full precision."""
    for seed, (name, targets) in enumerate(TARGETS.items()):
        model = make_model(layout)
        torch.manual_seed(10 + seed)
        chosen = add_adapter(model, LoRAConfig(targets, rank=3))
        base = base_checksum(model, chosen)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if key.endswith(".b"):
                    p.normal_(std=0.1)
        save_adapter(tmp_path / name, weights_of(model, model.state_dict(), base=base))
    return tmp_path


def tone(seconds: float, pitch: float = 220.0) -> Tensor:
    """A waveform at 16 kHz."""
    t = torch.arange(int(seconds * 16000)) / 16000
    return 0.3 * torch.sin(2 * torch.pi * pitch * t)


def features_of(model: SpeechModel, clips: Sequence[Tensor]) -> list[Tensor]:
    """Features [N, W] of each clip [S], one window and one clip at a time."""
    out, encoder = [], model.encoder
    with torch.no_grad():
        for clip in clips:
            heard = []
            for window in encoder.config.split(clip):
                mel = encoder.config.features(window)
                heard.append(encoder(mel[None], [mel.shape[1]], [encoder.config.frames(len(window))]))
            out.append(model.projector(torch.cat(heard), [sum(map(len, heard))]))
    return out


def last_logits(model: SpeechModel, tokens: Tensor, features: Tensor | None, index: Tensor) -> list[Tensor]:
    """Logits [V] of every stream after columns [K, C], by one plain forward over all of them."""
    with torch.no_grad():
        hidden = model(tokens[None], features, index[None])
        return [logits[0, -1] for logits in model.decoder.logits(hidden)]
