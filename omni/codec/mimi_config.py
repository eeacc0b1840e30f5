"""The sizes of a Mimi, read from the `config.json` of a Hugging Face folder (model_type "mimi").

Field names are the file's own. Entries that only matter to training or to the file's own loader are left out; entries whose
other values would make a codec that looks ahead, or another network, are checked and refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omni.errors import UserError

_ONLY: dict[str, tuple[Any, str]] = {
    "model_type": ("mimi", "this folder holds another kind of model"),
    "audio_channels": (1, "the codec is mono"),
    "use_causal_conv": (True, "a network that looks ahead cannot be streamed"),
    "trim_right_ratio": (1.0, "a network that looks ahead cannot be streamed"),
    "hidden_act": ("gelu", "no other activation is known"),
}
_PAD_MODES = ("constant", "replicate")


@dataclass(frozen=True)
class MimiConfig:
    """Sizes of the network; the defaults are those of kyutai/mimi.

    Attributes:
        hidden_size: channels D between the convolutions, the transformers and the quantizer.
        upsampling_ratios: strides of the decoder's convolutions; the encoder has them in reverse.
        frame_rate: frames per second; None means that two positions of the transformers make a frame.
        sliding_window: positions that a position of the transformers sees, itself included.
        num_quantizers: codebooks that the folder has; a codec may use the first few only.
    """

    sampling_rate: int = 24000
    frame_rate: float | None = None
    hidden_size: int = 512
    num_filters: int = 64
    num_residual_layers: int = 1
    upsampling_ratios: tuple[int, ...] = (8, 6, 5, 4)
    kernel_size: int = 7
    last_kernel_size: int = 3
    residual_kernel_size: int = 3
    dilation_growth_rate: int = 2
    pad_mode: str = "constant"
    compress: int = 2
    use_conv_shortcut: bool = False
    codebook_size: int = 2048
    codebook_dim: int | None = 256
    vector_quantization_hidden_dimension: int = 256
    num_quantizers: int = 32
    num_semantic_quantizers: int = 1
    upsample_groups: int = 512
    num_hidden_layers: int = 8
    intermediate_size: int = 2048
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int | None = None
    attention_bias: bool = False
    norm_eps: float = 1e-5
    sliding_window: int = 250
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        if self.pad_mode not in _PAD_MODES:
            raise UserError(f"Mimi pad_mode {self.pad_mode!r} cannot be streamed: use a model with one of {list(_PAD_MODES)}")
        if (self.codebook_dim or self.hidden_size) != self.vector_quantization_hidden_dimension:
            raise UserError(
                f"Mimi codebook_dim {self.codebook_dim} must be vector_quantization_hidden_dimension, "
                f"{self.vector_quantization_hidden_dimension}"
            )
        if self.num_quantizers <= self.num_semantic_quantizers:
            raise UserError(
                f"Mimi num_quantizers {self.num_quantizers} must exceed num_semantic_quantizers {self.num_semantic_quantizers}"
            )
        for whole, part in (
            ("hidden_size", "upsample_groups"),
            ("num_attention_heads", "num_key_value_heads"),
            ("hidden_size", "num_attention_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise UserError(f"Mimi {whole} {getattr(self, whole)} must be a multiple of {part} {getattr(self, part)}")
        if self.head_size % 2:
            raise UserError(f"Mimi head_dim {self.head_size} is odd: rotary positions need pairs of channels")
        if self.frame_rate is not None and self.latent_stride < 2:
            raise UserError(
                f"Mimi frame_rate {self.frame_rate} must be at most half of the convolutions' {self.sampling_rate / self.hop}"
            )

    @property
    def hop(self) -> int:
        """Samples of one position of the transformers."""
        return math.prod(self.upsampling_ratios)

    @property
    def latent_stride(self) -> int:
        """Positions of the transformers in one frame."""
        return 2 if self.frame_rate is None else int(math.ceil(self.sampling_rate / self.hop) / self.frame_rate)

    @property
    def frame_samples(self) -> int:
        """Samples of one frame."""
        return self.hop * self.latent_stride

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read_config(path: Path) -> MimiConfig:
    """Reads `config.json`; UserError for a missing or damaged file, another model_type, or a value that does not fit."""
    if not path.is_file():
        raise UserError(f"no Mimi config at {path}: the folder needs the config.json and model.safetensors of kyutai/mimi")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): fetch it again") from error
    if not isinstance(entries, dict):
        raise UserError(f"{path} holds no JSON object: fetch it again")
    if "model_type" not in entries:
        raise UserError(f"{path} has no model_type: the codec mimi reads folders in the format of kyutai/mimi")
    try:
        return _of_entries(entries)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _of_entries(entries: dict[str, Any]) -> MimiConfig:
    for key, (value, why) in _ONLY.items():
        if entries.get(key, value) != value:
            raise UserError(f"{key} is {entries[key]!r}, and the codec mimi needs {value!r}: {why}")
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise UserError(f"rope_parameters {rope!r} are unknown to the codec mimi: it needs rope_type 'default'")
    known = {field.name for field in fields(MimiConfig)}
    chosen = {key: value for key, value in {**rope, **entries}.items() if key in known}
    if isinstance(chosen.get("upsampling_ratios"), list):
        chosen["upsampling_ratios"] = tuple(chosen["upsampling_ratios"])
    if chosen.get("frame_rate") is None:
        chosen["frame_rate"] = entries.get("_frame_rate")  # where transformers 5 keeps what a file stated
    return MimiConfig(**chosen)


def _check(name: str, kind: str, value: Any) -> None:
    """UserError unless `value` is a positive number, a flag, or a text, as `kind` (an annotation) says."""
    if value is None and kind.endswith("| None"):
        return
    kind = kind.removesuffix(" | None")
    if kind == "tuple[int, ...]":
        fits = isinstance(value, tuple) and bool(value) and all(_is_positive(part, whole=True) for part in value)
    elif kind in ("int", "float"):
        fits = _is_positive(value, whole=kind == "int")
    else:
        fits = isinstance(value, bool if kind == "bool" else str)
    if not fits:
        wanted = {"bool": "true or false", "str": "a text", "int": "a whole number above 0", "float": "a number above 0"}
        raise UserError(f"Mimi {name} is {value!r}, not {wanted.get(kind, 'a list of whole numbers above 0')}: fix the config")


def _is_positive(value: Any, whole: bool) -> bool:
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf
