"""Models of random weights that take the time and memory of trained ones, and whose answers do not end.

The heads' rows for `end` are zero, so their logits are zero and the largest of thousands of random
ones is always another: an answer continues until its limit, and text and speech last equally long.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from omni.codec.base import AudioCodec
from omni.codec.registry import CODECS, load_codec
from omni.config import ModelConfig, preset
from omni.cpu.int8 import to_int8
from omni.encoder.whisper_config import EncoderMode, WhisperConfig
from omni.generate.speech_lm import SpeechLM
from omni.model.linears import fuse
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from omni.utils.hardware import find_dtype


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> SpeechModel:
    """A model of random weights that never ends an answer; takes little longer than writing the memory once."""
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in SpeechModel(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    reach = 0.02 * math.sqrt(3)  # uniform with a standard deviation of 0.02
    block = torch.empty(1 << 22).uniform_(-reach, reach, generator=generator).to(device, dtype)
    state = {name: _fill(name, shape, block) for name, shape in shapes.items()}
    model = SpeechModel.from_state(config, state, where="random weights").to(device).eval().requires_grad_(False)
    silence_ends(model)
    if device.type == "cuda":
        fuse(model.decoder)
    return model


def _fill(name: str, shape: torch.Size, block: Tensor) -> Tensor:
    """Fills a parameter: norms with 1, biases with 0, everything else with pieces of the random block."""
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=block.dtype, device=block.device)
    out = torch.empty(shape, dtype=block.dtype, device=block.device)
    for piece in out.view(-1).split(len(block)):
        piece.copy_(block[: len(piece)])
    return out


@torch.no_grad()
def silence_ends(model: SpeechModel) -> None:
    """Makes `end` the least likely of the ids on every stream of a model of random weights."""
    for k, end in enumerate(model.layout.ids("end").tolist()):
        model.decoder.head_weight(k)[end:] = 0  # the special ids, `end` first


def with_encoder_mode(config: ModelConfig, mode: EncoderMode) -> ModelConfig:
    """A preset with its encoder in another mode."""
    assert isinstance(config.encoder, WhisperConfig)  # all presets have one
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, mode=mode))


def random_codec(name: str, device: torch.device) -> AudioCodec:
    """A codec at its real size, with random weights where it has some."""
    spec = CODECS.find(name)
    return spec.load(None, device) if spec.random else load_codec(name, device=device)


def preset_lm(name: str, device: torch.device, dtype: str | None, quantize: str | None, mode: EncoderMode) -> SpeechLM:
    """A preset with random weights and its codec; compiled on a GPU."""
    config = with_encoder_mode(preset(name), mode)
    model = random_model(config, device, bench_dtype(dtype, device))
    if quantize:
        to_int8(model)
    return SpeechLM(model, Tokenizer.bytes(), random_codec(config.codec, device), compile=device.type == "cuda")


def bench_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The number format to measure in; without one, or with `auto`, bf16 on a GPU and fp32 elsewhere."""
    return find_dtype(name) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
