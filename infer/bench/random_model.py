"""Models of random weights that take the time and memory of trained ones, and whose answers do not end.

The heads' rows for `end` are zero, so their logits are zero and the largest of thousands of random
ones is always another: an answer continues until its limit, and text and speech last equally long.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni.codec.base import AudioCodec, CodecStream
from omni.codec.batch import CodecBatch
from omni.codec.registry import CODECS, load_codec
from omni.config import ModelConfig
from omni.encoder.whisper_config import EncoderMode, WhisperConfig
from omni.generate.speech_lm import SpeechLM
from omni.hardware import synchronize
from omni.model.fused import fuse
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer

S = TypeVar("S", CodecStream, CodecBatch)

_BLOCK = 1 << 22

RANDOM = "random-"
"""Before the names of codecs with random weights (`infer.bench.live.random_codecs`)."""


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> SpeechModel:
    """A model of random weights that never ends an answer; takes little longer than writing the memory once."""
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in SpeechModel(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    reach = 0.02 * math.sqrt(3)  # uniform with a standard deviation of 0.02
    block = torch.empty(_BLOCK).uniform_(-reach, reach, generator=generator).to(device, dtype)
    state = {name: _fill(name, shape, block) for name, shape in shapes.items()}
    model = SpeechModel.from_state(config, state, where="random weights").to(device).eval().requires_grad_(False)
    silence_ends(model)
    return model


def _fill(name: str, shape: torch.Size, block: Tensor) -> Tensor:
    """Fills a parameter: norms with 1, biases with 0, everything else with pieces of the random block."""
    if len(shape) == 1:
        value = 0.0 if name.endswith("bias") else 1.0
        return torch.full(shape, value, dtype=block.dtype, device=block.device)
    out = torch.empty(shape, dtype=block.dtype, device=block.device)
    for piece in out.view(-1).split(len(block)):
        piece.copy_(block[: len(piece)])
    return out


@torch.no_grad()
def silence_ends(model: SpeechModel) -> None:
    """Make `end` the least likely of the ids on every stream of a model of random weights."""
    decoder = model.decoder
    for k, end in enumerate(model.layout.ids("end").tolist()):
        decoder.head_weight(k)[end:] = 0  # the special ids, `end` first


def with_encoder_mode(config: ModelConfig, mode: EncoderMode) -> ModelConfig:
    """A preset with its encoder in another mode."""
    assert isinstance(config.encoder, WhisperConfig)  # all presets have one
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, mode=mode))


def random_codec(name: str, device: torch.device) -> AudioCodec:
    """A codec at its real size, with random weights where it has some."""
    spec = CODECS.find(name)
    return spec.random(device) if spec.random is not None else load_codec(name, device=device)


class TimedCodec(AudioCodec):
    """A codec that counts the seconds its streams spend decoding, in all and until they gave the first sound."""

    def __init__(self, inner: AudioCodec) -> None:
        self.inner = inner
        self.name, self.sample_rate, self.frame_samples = inner.name, inner.sample_rate, inner.frame_samples
        self.codebook_sizes, self.lookahead = inner.codebook_sizes, inner.lookahead
        self.deterministic, self.device, self.takes_threads = inner.deterministic, inner.device, inner.takes_threads
        self.begin()

    def begin(self) -> None:
        """Count from 0."""
        self.seconds = self.first = 0.0

    def exact_samples(self, frames: int) -> int:
        return self.inner.exact_samples(frames)

    def stream(self, seed: int = 0) -> CodecStream:
        return self._with_timing(self.inner.stream(seed))

    def batch(self) -> CodecBatch:
        return self._with_timing(self.inner.batch())

    def _with_timing(self, streams: S) -> S:
        for name in ("push", "finish"):
            setattr(streams, name, self._timed(getattr(streams, name)))
        return streams

    def _timed(self, method: Any) -> Any:
        def timed(*args: Any) -> Any:
            synchronize(self.inner.device)  # steps that are still under way are not the codec's
            start = time.perf_counter()
            samples = method(*args)
            synchronize(self.inner.device)
            self.seconds += time.perf_counter() - start
            sounds = samples if isinstance(samples, list) else [samples]
            if not self.first and any(isinstance(sound, Tensor) and len(sound) for sound in sounds):
                self.first = self.seconds
            return samples

        return timed

    def _encode(self, audio: Tensor) -> Tensor:
        return self.inner._encode(audio)


def random_lm(config: ModelConfig, device: torch.device, dtype: torch.dtype, compile: bool = False) -> SpeechLM:
    """A `SpeechLM` of random weights, with a codec that is timed."""
    codec, model = TimedCodec(random_codec(config.codec, device)), random_model(config, device, dtype)
    if device.type == "cuda":
        fuse(model.decoder)
    return SpeechLM(model, Tokenizer.bytes(), codec, compile=compile)
