"""Configuration of a model: frozen dataclasses, strict reading and the presets.

A configuration is data: it is written as `config.json` beside the weights and read back by `from_dict`, which refuses keys
it does not know (naming the closest) and values of the wrong type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator, PositiveFloat

from omni.codec.registry import CODECS
from omni.encoder.config import ENCODERS, EncoderConfig
from omni.encoder.whisper_config import ENCODER_PRESETS, WhisperConfig
from omni.errors import UserError, closest
from omni.layout import LARGEST, Layout
from omni.tasks import Task, find_task, find_writer
from omni.utils.configuration import configuration, validate

T = TypeVar("T")

FORMAT_VERSION = 1


Size = Annotated[int, Field(ge=1, le=1 << 24)]
Count = Annotated[int, Field(ge=1, le=1000)]
Heads = Annotated[int, Field(ge=1, le=1 << 16)]
Ids = Annotated[int, Field(ge=0, le=LARGEST)]
"""Sizes far beyond any model, yet small enough that a larger value is refused before memory is taken for it."""


@configuration
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies (`rope_type: llama3` in transformers, `modeling_rope_utils.py`)."""

    factor: PositiveFloat = 32.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_context: Annotated[int, Field(ge=1, le=1 << 31)] = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            factors = f"high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor, {self.low_freq_factor}"
            raise UserError(f"decoder.rope_scaling.{factors}")


@configuration
class DecoderConfig:
    """Shape of the decoder. Qwen2/2.5/3, Llama 3, Mistral and mini-omni are settings of this one class.

    Attributes:
        width: size D of the residual stream.
        heads, kv_heads: query heads and key/value heads (grouped-query attention).
        head_dim: size of a head; 0 means width / heads.
        mlp_width: inner size of SwiGLU.
        window: sliding attention window in positions (a position sees itself and window - 1 before it), None for all.
        context: positions the model is meant for.
        tie_text: the text head is the text embedding.
        combine: how the embeddings of the streams become one: `mean` (mini-omni) or `sum`.
        post_layers: blocks after the text head's branch, before the audio heads (mini-omni's TTS adapter).
    """

    width: Size = 256
    layers: Count = 4
    heads: Heads = 4
    kv_heads: Heads = 4
    head_dim: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    mlp_width: Size = 1024
    context: Annotated[int, Field(ge=1, le=1 << 31)] = 2048
    rope_base: Annotated[float, Field(ge=1, le=1e15)] = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: Annotated[int, Field(ge=1)] | None = None
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    tie_text: bool = False
    combine: Literal["mean", "sum"] = "mean"
    post_layers: Annotated[int, Field(ge=0, le=1000)] = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(f"decoder.heads {self.heads} is not a multiple of decoder.kv_heads {self.kv_heads}")
        if not self.head_dim and self.width % self.heads:
            raise UserError(f"decoder.width {self.width} is not a multiple of decoder.heads {self.heads}; set head_dim")
        if self.head_size % 2:
            raise UserError(f"decoder: head size {self.head_size} is odd; rotary positions need an even one")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


@configuration
class TransformerSettings:
    """Settings of the projector `transformer`: blocks of the decoder's width, heads and inner size of each, dropout, and how
    many positions before and after its own one attends to (0: the whole clip)."""

    layers: Count = 2
    heads: Heads = 8
    mlp: Size = 1024
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    window: Annotated[int, Field(ge=0)] = 6


@configuration
class ProjectorConfig:
    """Shape of the projector, which turns encoder frames into decoder positions.

    Attributes:
        kind: `linear`, `mlp` (two layers, GELU), `gated` (mini-omni's gated MLP), `transformer` (an MLP, then
            blocks over each whole clip: `TransformerSettings`), or one whose parts tasks share, gated by task: `hard`, `mmoe`,
            `cgc`, `ple`, `cross_stitch`, `mtan`, `ltb` or `dselect_k` (see `omni.model.multitask_projector`).
        hidden: inner size of `mlp`, `gated` and the MLP of `transformer`.
        stack: number of frames joined into one position; a clip's last, unfinished group is filled with zeros.
        bias: the linear layers have a bias.
        tasks: of a shared kind, the tasks it has parts for; they ask by speech.
        settings: of `transformer` (`TransformerSettings`) or a shared kind, such as `experts`; others keep their defaults.
    """

    kind: Literal[
        "linear", "mlp", "gated", "transformer", "hard", "mmoe", "cgc", "ple", "cross_stitch", "mtan", "ltb", "dselect_k"
    ] = "linear"
    hidden: Size = 1024
    stack: Count = 1
    bias: bool = True
    tasks: tuple[str, ...] = ("A1T1", "A1T2", "A1A2")
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind in ("linear", "mlp", "gated"):
            if self.settings:
                raise UserError(f"projector.settings are of kinds whose parts tasks share; {self.kind} has none: leave out")
            return
        if self.kind == "transformer":
            from_dict(TransformerSettings, dict(self.settings), "projector.settings")
            return
        from omni.model.multitask_projector import check_settings

        check_settings(self.kind, self.settings, "projector.settings")
        for name in self.tasks:
            if find_task(name).question != "audio":
                raise UserError(f"projector.tasks has {name}, which asks in writing; name tasks that ask by speech")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"projector.tasks is {list(self.tasks)}; name each task once, and at least one")


def read_encoder(value: Any) -> EncoderConfig:
    """Makes the encoder's configuration of plain data; `kind` names another than Whisper's."""
    if isinstance(value, EncoderConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("give a mapping of keys")
    kind = ENCODERS.find(value.get("kind", "whisper"), "encoder.kind")
    return validate(kind, {key: content for key, content in value.items() if key != "kind"}, lambda path: "encoder: ")


@configuration
class ModelConfig:
    """A whole speech language model.

    Attributes:
        codec: name of the audio codec (`codec2`, `snac`, or one that was registered), which the layout's audio streams must
            fit; `none` where it was not taught to speak.
        ctc: ids of an alignment head on the encoder (blank first), 0 for none, used in training only; or `tokens`: it reads
            features as tokens of the text stream, and the decoder takes what it reads (`omni.model.projector.TokenHead`).
        ctc_sounds: ids of its second spelling, by sounds (their blank first); they follow those of the first.
        turn: a head on the encoder's frames says whether there is a voice, and whether the question has ended.
    """

    layout: Layout = field(default_factory=lambda: Layout.preset("codec2"))
    encoder: Annotated[EncoderConfig, PlainValidator(read_encoder)] = field(default_factory=WhisperConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    codec: str = "codec2"
    ctc: Ids | Literal["tokens"] = 0
    ctc_sounds: Ids = 0
    turn: bool = False

    def __post_init__(self) -> None:
        if self.ctc_sounds and self.ctc in (0, "tokens"):
            raise UserError(f"ctc_sounds is {self.ctc_sounds}, a second spelling, but ctc is {self.ctc}: give a first, or none")
        if self.projector.kind == "transformer":
            heads = self.projector.settings.get("heads", TransformerSettings.heads)
            if self.decoder.width % heads:
                raise UserError(f"projector.settings.heads {heads} does not divide decoder.width {self.decoder.width}")
        if self.turn and not self.encoder.streams:
            raise UserError(
                "turn is true, but the encoder's frames hear what comes after them: set encoder.mode to chunked, or turn to "
                "false"
            )
        if self.layout.talker and (self.decoder.combine != "sum" or not self.decoder.post_layers):
            raise UserError("layout.talker needs decoder.post_layers, and decoder.combine: sum")
        delay, context = max(self.layout.delays), self.decoder.context
        if delay >= context:
            raise UserError(f"layout: a stream's delay is {delay}, but decoder.context is {context}; it must be less")

    @property
    def ctc_ids(self) -> int:
        """Ids of the alignment head on the encoder, of both spellings; 0 for none there."""
        return 0 if self.ctc == "tokens" else self.ctc + self.ctc_sounds

    @property
    def feature_factor(self) -> int:
        """How many times as large as its token a text embedding would be read, were it a feature beside pads of zeros."""
        if self.decoder.combine == "sum":
            return 1
        return self.layout.n_audio if self.layout.features == "replace" else len(self.layout)

    def answers(self, task: Task | str) -> Task:
        """The task as which it answers: the one in writing, where it was not taught to speak."""
        task = find_task(task)
        return find_writer(task) if self.codec == "none" and task.text and task.audio else task

    def features(self, samples: int) -> int:
        """Decoder positions that a clip of `samples` at 16 kHz takes."""
        return -(-self.encoder.frames(samples) // self.projector.stack)


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a configuration to plain data (dicts, lists, numbers, strings); an encoder other than Whisper names its kind."""
    data = dataclasses.asdict(config)
    if isinstance(config, ModelConfig):
        if not isinstance(config.encoder, WhisperConfig):
            data["encoder"] = {"kind": config.encoder.kind, **data["encoder"]}
        for part, key in ((data["layout"], "chat"), *((stream, "end") for stream in data["layout"]["streams"])):
            if part[key] is None:  # as folders have it that are older than these keys
                del part[key]
        if not data["layout"]["talker"]:
            del data["layout"]["talker"]
    return data


def from_dict(config_type: type[T], data: Any, where: str = "config") -> T:
    """Reads plain data into the dataclass `config_type`; `where` begins an error's line.

    Raises:
        UserError: an unknown key (the closest known one is named), a missing one, or a wrong value.
    """
    config = validate(config_type, data, lambda path: f"{where}: ")
    if isinstance(config, ModelConfig):
        CODECS.find(config.codec, f"{where}.codec")
    return config


# --- presets ----------------------------------------------------------------------------------------------------------


def _snac(text_size: int, hidden: int, **decoder: Any) -> ModelConfig:
    """A text model that hears by Whisper small, and speaks by SNAC."""
    return ModelConfig(
        layout=Layout.build([4096] * 7, text_size),
        encoder=ENCODER_PRESETS["small"],
        projector=ProjectorConfig("gated", hidden=hidden),
        decoder=DecoderConfig(**decoder),
        codec="snac",
    )


_PRESETS = {
    "nano": ModelConfig(
        layout=Layout.preset("codec2"),
        encoder=ENCODER_PRESETS["nano"],
        projector=ProjectorConfig("mlp", hidden=192, stack=2),
        decoder=DecoderConfig(width=192, layers=4, heads=3, kv_heads=1, mlp_width=512, context=1024, qk_norm=True),
    ),
    # gpt-omni/mini-omni @ 26c31d5, `litgpt/config.py` and the released `model_config.yaml`
    "qwen2-0.5b-omni": ModelConfig(
        layout=Layout.preset("mini-omni"),
        encoder=ENCODER_PRESETS["small"],
        projector=ProjectorConfig("gated", hidden=4864, bias=False),
        decoder=DecoderConfig(
            width=896, layers=24, heads=14, kv_heads=2, mlp_width=4864, context=2048, rope_base=1e6, qkv_bias=True
        ),
        codec="snac",
    ),
    # Qwen/Qwen3-0.6B, meta-llama/Llama-3.2-1B and mistralai/Mistral-7B-v0.1, `config.json` of each
    "qwen3-0.6b": _snac(
        151936, 4096, width=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_width=3072, context=40960,
        rope_base=1e6, qk_norm=True, tie_text=True,
    ),
    "llama-3.2-1b": _snac(
        128256, 8192, width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp_width=8192, context=131072,
        rope_base=5e5, rope_scaling=RopeScaling(), norm_eps=1e-5, tie_text=True,
    ),
    "mistral-7b": _snac(
        32000, 14336, width=4096, layers=32, heads=32, kv_heads=8, mlp_width=14336, context=32768, window=4096, norm_eps=1e-5
    ),
}  # fmt: skip
PRESETS = tuple(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The preset of that name; UserError with the closest name where there is none."""
    if name not in _PRESETS:
        raise UserError(f"preset {name!r} is unknown; {closest(name, PRESETS)}")
    return _PRESETS[name]
