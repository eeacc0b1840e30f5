"""Configuration of a model: frozen dataclasses, strict reading and the presets.

A configuration is data: it is written as `config.json` beside the weights and read back by `from_dict`, which refuses keys
it does not know (naming the closest) and values of the wrong type.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union

from omni.codec.registry import check_codec_name
from omni.encoder.config import ENCODERS, EncoderConfig
from omni.encoder.whisper_config import ENCODER_PRESETS, WhisperConfig
from omni.errors import UserError, closest
from omni.layout import LARGEST, Layout
from omni.tasks import find_task
from omni.utils.ranges import check_fields, ranged

T = TypeVar("T")

FORMAT_VERSION = 1


MOST = {
    "width": 1 << 20, "layers": 1000, "heads": 1 << 16, "kv_heads": 1 << 16, "head_dim": 1 << 16, "mlp_width": 1 << 24,
    "context": 1 << 31, "post_layers": 1000, "hidden": 1 << 24, "stack": 1000,
}  # fmt: skip
"""Largest sizes of a decoder and a projector: far beyond any model, yet small enough that a larger value is refused before
memory is taken for it."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies (`rope_type: llama3` in transformers, `modeling_rope_utils.py`)."""

    factor: float = ranged(32.0, above=0, below=math.inf)
    low_freq_factor: float = ranged(1.0, above=0, below=math.inf)
    high_freq_factor: float = ranged(4.0, above=0, below=math.inf)
    original_context: int = ranged(8192, 1, MOST["context"])

    def __post_init__(self) -> None:
        check_fields(self, "decoder.rope_scaling")
        if self.high_freq_factor <= self.low_freq_factor:
            factors = f"high_freq_factor is {self.high_freq_factor}; it must be above low_freq_factor, {self.low_freq_factor}"
            raise UserError(f"decoder.rope_scaling.{factors}")


@dataclass(frozen=True)
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

    width: int = ranged(256, 1, MOST["width"])
    layers: int = ranged(4, 1, MOST["layers"])
    heads: int = ranged(4, 1, MOST["heads"])
    kv_heads: int = ranged(4, 1, MOST["kv_heads"])
    head_dim: int = ranged(0, 0, MOST["head_dim"])
    mlp_width: int = ranged(1024, 1, MOST["mlp_width"])
    context: int = ranged(2048, 1, MOST["context"])
    rope_base: float = ranged(10000.0, 1, 1e15, way=", such as 10000")
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = ranged(None, 1, way=", or null for full attention")
    norm_eps: float = ranged(1e-6, above=0, most=1, way=", such as 1e-6")
    tie_text: bool = False
    combine: Literal["mean", "sum"] = "mean"
    post_layers: int = ranged(0, 0, MOST["post_layers"])

    def __post_init__(self) -> None:
        check_fields(self, "decoder")
        if self.heads % self.kv_heads:
            raise UserError(f"decoder.heads {self.heads} is not a multiple of decoder.kv_heads {self.kv_heads}")
        if not self.head_dim and self.width % self.heads:
            raise UserError(f"decoder.width {self.width} is not a multiple of decoder.heads {self.heads}; set head_dim")
        if self.head_size % 2:
            raise UserError(f"decoder: head size {self.head_size} is odd; rotary positions need an even one")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.width // self.heads


@dataclass(frozen=True)
class ProjectorConfig:
    """Shape of the projector, which turns encoder frames into decoder positions.

    Attributes:
        kind: `linear`, `mlp` (two layers, GELU), `gated` (mini-omni's gated MLP), or one whose parts tasks share, gated by
            task: `hard`, `mmoe`, `cgc`, `ple`, `cross_stitch`, `mtan`, `ltb` or
            `dselect_k` (see `omni.model.multitask_projector`).
        hidden: inner size of `mlp` and `gated`.
        stack: number of frames joined into one position; a clip's last, unfinished group is filled with zeros.
        bias: the linear layers have a bias.
        tasks: of a shared kind, the tasks it has parts for; they ask by speech.
        settings: of a shared kind, such as `experts`; the others keep their defaults.
    """

    kind: Literal["linear", "mlp", "gated", "hard", "mmoe", "cgc", "ple", "cross_stitch", "mtan", "ltb", "dselect_k"] = "linear"
    hidden: int = ranged(1024, 1, MOST["hidden"])
    stack: int = ranged(1, 1, MOST["stack"])
    bias: bool = True
    tasks: tuple[str, ...] = ("A1T1", "A1T2", "A1A2")
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, "projector")
        if self.kind in ("linear", "mlp", "gated"):
            if self.settings:
                raise UserError(f"projector.settings are of kinds whose parts tasks share; {self.kind} has none: leave out")
            return
        from omni.model.multitask_projector import check_settings

        check_settings(self.kind, self.settings, "projector.settings")
        for name in self.tasks:
            if find_task(name).question != "audio":
                raise UserError(f"projector.tasks has {name}, which asks in writing; name tasks that ask by speech")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"projector.tasks is {list(self.tasks)}; name each task once, and at least one")


@dataclass(frozen=True)
class ModelConfig:
    """A whole speech language model.

    Attributes:
        codec: name of the audio codec (`codec2`, `snac`, or one that was registered), which the layout's audio streams must
            fit.
        ctc: ids of an alignment head on the encoder (blank first), 0 for none; used in training only.
        ctc_sounds: ids of its second spelling, by sounds (their blank first); they follow those of the first.
        turn: a head on the encoder's frames says whether there is a voice, and whether the question has ended.
    """

    layout: Layout = field(default_factory=lambda: Layout.preset("codec2"))
    encoder: EncoderConfig = field(default_factory=WhisperConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    codec: str = field(default="codec2", metadata={"check": check_codec_name})
    ctc: int = ranged(0, 0, LARGEST)
    ctc_sounds: int = ranged(0, 0, LARGEST)
    turn: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ctc_sounds and not self.ctc:
            raise UserError(f"ctc_sounds is {self.ctc_sounds}, a second spelling, but ctc is 0: give a first, or none")
        if self.encoder.width < 1:
            raise UserError(f"encoder.width is {self.encoder.width}; it must be at least 1")
        if self.turn and not self.encoder.streams:
            raise UserError(
                "turn is true, but the encoder's frames hear what comes after them: set encoder.mode to chunked, or turn to "
                "false"
            )
        delay, context = max(self.layout.delays), self.decoder.context
        if delay >= context:
            raise UserError(f"layout: a stream's delay is {delay}, but decoder.context is {context}; it must be less")

    def features(self, samples: int) -> int:
        """Decoder positions that a clip of `samples` at 16 kHz takes."""
        return -(-self.encoder.frames(samples) // self.projector.stack)


def to_dict(config: Any) -> dict[str, Any]:
    """Converts a configuration to plain data (dicts, lists, numbers, strings); an encoder other than Whisper names its kind."""
    data = dataclasses.asdict(config)
    if isinstance(config, ModelConfig) and not isinstance(config.encoder, WhisperConfig):
        data["encoder"] = {"kind": config.encoder.kind, **data["encoder"]}
    return data


def from_dict(config_type: type[T], data: Any, where: str = "config") -> T:
    """Read plain data strictly into the dataclass `config_type`.

    Raises:
        UserError: an unknown key (the closest known one is named), a missing one, or a value of another type.
    """
    fields = {f.name: f for f in dataclasses.fields(config_type) if f.init}  # type: ignore[arg-type]
    if not isinstance(data, Mapping):
        raise UserError(f"{where} is {data!r}; it must be a mapping with keys of {config_type.__name__}: {', '.join(fields)}")
    hints = typing.get_type_hints(config_type)
    for key in data:
        if key not in fields:
            close = get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(fields)}"
            raise UserError(f"{where}: unknown key {key!r}; {hint}")
    for name, f in fields.items():
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and name not in data:
            raise UserError(f"{where}: key {name!r} is missing")
    for key, value in data.items():
        most = fields[key].metadata.get("most")
        if most is not None and isinstance(value, (list, tuple)) and len(value) > most:  # before each of them is read
            raise UserError(f"{where}.{key} has {len(value)} entries; it must have at most {most}")
    values = {key: _value(hints[key], value, f"{where}.{key}") for key, value in data.items()}
    for key, value in values.items():
        if check := fields[key].metadata.get("check"):
            check(value, f"{where}.{key}")
    return config_type(**values)


def _is_list_of(hint: Any, value: Any) -> bool:
    return typing.get_origin(hint) is tuple and isinstance(value, (list, tuple))


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        fitting = [a for a in inner if (isinstance(a, type) and type(value) is a) or _is_list_of(a, value)]
        return _value((fitting or inner)[0], value, where)
    if origin is Literal:
        if value not in args:
            close = get_close_matches(str(value), map(str, args), 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"{where} is {value!r}; {hint}it must be one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{where} is {value!r}; it must be a list")
        hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(hints) != len(value):
            raise UserError(f"{where} has {len(value)} entries; it must have {len(hints)}")
        return tuple(_value(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {value!r}; it must be a mapping")
        return dict(value)
    if hint is EncoderConfig:
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {value!r}; it must be a mapping of keys")
        value = dict(value)
        hint = ENCODERS.find(value.pop("kind", "whisper"), f"{where}.kind")
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise UserError(f"{where} is {value!r}; it must be of type {hint.__name__}")
    return value


# --- presets ----------------------------------------------------------------------------------------------------------


def _mini_omni() -> ModelConfig:
    """gpt-omni/mini-omni @ 26c31d5, `litgpt/config.py` and the released `model_config.yaml`."""
    return ModelConfig(
        layout=Layout.preset("mini-omni"),
        encoder=ENCODER_PRESETS["small"],
        projector=ProjectorConfig("gated", hidden=4864, bias=False),
        decoder=DecoderConfig(
            width=896, layers=24, heads=14, kv_heads=2, mlp_width=4864, context=2048, rope_base=1e6, qkv_bias=True
        ),
        codec="snac",
    )


def _nano() -> ModelConfig:
    return ModelConfig(
        layout=Layout.preset("codec2"),
        encoder=ENCODER_PRESETS["nano"],
        projector=ProjectorConfig("mlp", hidden=192, stack=2),
        decoder=DecoderConfig(width=192, layers=4, heads=3, kv_heads=1, mlp_width=512, context=1024, qk_norm=True),
        codec="codec2",
    )


def _snac_layout(text_size: int) -> Layout:
    return Layout.build([4096] * 7, text_size)


def _qwen3() -> ModelConfig:
    """Qwen/Qwen3-0.6B `config.json`."""
    return ModelConfig(
        layout=_snac_layout(151936),
        encoder=ENCODER_PRESETS["small"],
        projector=ProjectorConfig("gated", hidden=4096),
        decoder=DecoderConfig(
            width=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp_width=3072, context=40960,
            rope_base=1e6, qk_norm=True, tie_text=True,
        ),
        codec="snac",
    )  # fmt: skip


def _llama32() -> ModelConfig:
    """meta-llama/Llama-3.2-1B `config.json`."""
    return ModelConfig(
        layout=_snac_layout(128256),
        encoder=ENCODER_PRESETS["small"],
        projector=ProjectorConfig("gated", hidden=8192),
        decoder=DecoderConfig(
            width=2048, layers=16, heads=32, kv_heads=8, head_dim=64, mlp_width=8192, context=131072,
            rope_base=5e5, rope_scaling=RopeScaling(), norm_eps=1e-5, tie_text=True,
        ),
        codec="snac",
    )  # fmt: skip


def _mistral() -> ModelConfig:
    """mistralai/Mistral-7B-v0.1 `config.json`."""
    return ModelConfig(
        layout=_snac_layout(32000),
        encoder=ENCODER_PRESETS["small"],
        projector=ProjectorConfig("gated", hidden=14336),
        decoder=DecoderConfig(
            width=4096, layers=32, heads=32, kv_heads=8, mlp_width=14336, context=32768, window=4096, norm_eps=1e-5
        ),
        codec="snac",
    )


_PRESETS = {
    "nano": _nano,
    "qwen2-0.5b-omni": _mini_omni,
    "qwen3-0.6b": _qwen3,
    "llama-3.2-1b": _llama32,
    "mistral-7b": _mistral,
}
PRESETS = tuple(_PRESETS)


def preset(name: str) -> ModelConfig:
    """The preset of that name; UserError with the closest name where there is none."""
    if name not in _PRESETS:
        raise UserError(f"preset {name!r} is unknown; {closest(name, PRESETS)}")
    return _PRESETS[name]()
