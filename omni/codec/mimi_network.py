"""Builds Mimi's encoder, quantizer and decoder from the tensors of its file.

    sound -> encoder: convolutions, transformer, downsampling -> latents [F, D] -> quantizer -> codes [K, F]
    codes -> quantizer -> latents [F, D] -> decoder: upsampling, transformer, convolutions -> sound

The quantizer is split: the first codebook (the semantic one, distilled from a speech encoder) and the residual codebooks after
it each start from the same latent; decoded, both parts are summed. The transformer keeps the keys and values of its sliding
window: a frame takes the same work and memory however long the stream is. Network: Defossez and others, "Moshi: a speech-text
foundation model for real-time dialogue" (2024), section 3.3, as transformers' `MimiModel` builds it. Names of tensors are those
of kyutai/mimi's `model.safetensors`.

Sizes are read from the `config.json` of a Hugging Face folder (model_type "mimi"), whose field names are kept. Entries that
only matter to training or to the file's own loader are ignored; entries that would make a codec with lookahead, or another
network, are checked and refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.codec.network import Layer, LayerTiming, Network, StreamCall
from omni.codec.streaming import Activation, Conv, Residual, Upsample, product
from omni.errors import UserError
from omni.files import read_json
from omni.model.attention import attention
from omni.model.kv_cache import KVCache


class MimiBlock(NamedTuple):
    """Attention and a GELU MLP, each after a layer norm and with its layer scale folded into its last matrix.

    Matrices are [out, in]; `qkv` has the queries' rows first, then the keys', then the values'. A norm is (gain, offset).
    """

    attention_norm: tuple[Tensor, Tensor]
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: tuple[Tensor, Tensor]
    up: Tensor
    down: Tensor


@dataclass(eq=False)
class Transformer(Layer):
    """Causal blocks with a sliding window and rotary positions (the two halves of a head are the coordinates)."""

    blocks: list[MimiBlock]
    heads: int
    key_heads: int
    window: int
    eps: float
    inverse_frequencies: Tensor

    def place(self, timing: LayerTiming, network: Network) -> LayerTiming:
        self.timing, self.number = timing, len(network.caches)
        network.caches.append(self._make_cache)
        return timing

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        if x.shape[1] == 0:
            return x
        cache, positions = call.cache(self.number), call.positions(self.timing, x.shape[1])
        mask = cache.begin_forward(positions)
        angles = (positions[..., None].float() * self.inverse_frequencies).repeat(1, 1, 2)[:, None]  # [N, 1, T, D]
        turn = angles.cos(), angles.sin()
        for number, block in enumerate(self.blocks):
            y = F.layer_norm(x, x.shape[2:], *block.attention_norm, eps=self.eps)
            x = x + self._attend(cache, number, y, turn, mask)
            y = F.layer_norm(x, x.shape[2:], *block.mlp_norm, eps=self.eps)
            x = x + product(F.gelu(product(y, block.up)), block.down)
        return x

    def _attend(self, cache: KVCache, number: int, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        block, grouped = self.blocks[number], self.heads != self.key_heads
        heads = product(x, block.qkv, block.qkv_bias).unflatten(2, (self.heads + 2 * self.key_heads, -1)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.key_heads, self.key_heads], dim=1)  # each [N, H, T, D]
        cos, sin = turn
        half = cos.shape[-1] // 2
        q, k = (part * cos + torch.cat([-part[..., half:], part[..., :half]], dim=-1) * sin for part in (q, k))
        keys, values = cache.update(number, k, v)
        y = attention(q, keys, values, mask, grouped=grouped)
        return product(y.transpose(1, 2).flatten(2), block.out, block.out_bias)

    def _make_cache(self, rows: int, frames: int) -> KVCache:
        return KVCache(
            len(self.blocks),
            rows=rows,
            length=2**62,  # unbounded: the window makes the cache a ring
            heads=self.key_heads,
            head_dim=2 * len(self.inverse_frequencies),
            window=self.window,
            chunk=frames * self.timing.rate,
            device=self.inverse_frequencies.device,
        )


SMALLEST_USAGE = 1e-5
"""Least usage that a codebook's sums are divided by, for codes that training never used."""

ELU = Activation(F.elu)


Take = Callable[..., Tensor]
"""`take(name, *shape)` gives the tensor `name`, which must have that shape, as float32 on the codec's device."""


class Codebooks(NamedTuple):
    """One residual part of the quantizer: `tables` [N, d] each, between projections [d, D] and [D, d] (or none)."""

    tables: tuple[Tensor, ...]
    project_in: Tensor | None
    project_out: Tensor | None

    def encode(self, latents: Tensor) -> Tensor:
        """Codes `[n, F]` of latents `[F, D]`: in each codebook the entry nearest to the residual of those before it."""
        rest = latents if self.project_in is None else F.linear(latents, self.project_in)
        codes = []
        for table in self.tables:
            codes.append(torch.cdist(rest[None], table[None])[0].argmin(dim=1))
            rest = rest - table[codes[-1]]
        return torch.stack(codes)

    def decode(self, codes: Tensor) -> Tensor:
        """Latents `[F, D]` of codes `[n, F]`."""
        total = self.tables[0][codes[0]]
        for table, row in zip(self.tables[1:], codes[1:], strict=True):
            total = total + table[row]
        return total if self.project_out is None else F.linear(total, self.project_out)


def quantizer(config: MimiConfig, take: Take, codebooks: int) -> list[Codebooks]:
    """The split quantizer with the first `codebooks` of its codebooks: latents are the sum of what its parts decode."""
    size, inside = config.hidden_size, config.vector_quantization_hidden_dimension
    semantic = min(codebooks, config.num_semantic_quantizers)
    parts = []
    for part, count in {"semantic": semantic, "acoustic": codebooks - semantic}.items():
        if not count:
            continue
        name, tables = f"quantizer.{part}_residual_vector_quantizer", []
        for layer in range(count):
            total = take(f"{name}.layers.{layer}.codebook.embed_sum", config.codebook_size, inside)
            usage = take(f"{name}.layers.{layer}.codebook.cluster_usage", config.codebook_size)
            tables.append(total / usage.clamp(min=SMALLEST_USAGE)[:, None])
        project_in = project_out = None
        if inside != size:
            project_in = take(f"{name}.input_proj.weight", inside, size, 1)[:, :, 0]
            project_out = take(f"{name}.output_proj.weight", size, inside, 1)[:, :, 0]
        parts.append(Codebooks(tuple(tables), project_in, project_out))
    return parts


def encoder(config: MimiConfig, take: Take) -> list[Layer]:
    """Layers from sound `[N, S, 1]` to latents `[N, F, D]`."""
    filters = config.num_filters
    layers: list[Layer] = [_conv(config, take, "encoder.layers.0", 1, filters, config.kernel_size)]
    for ratio in reversed(config.upsampling_ratios):
        for depth in range(config.num_residual_layers):
            layers.append(_residual(config, take, f"encoder.layers.{len(layers)}", filters, depth))
        layers.append(ELU)
        layers.append(_conv(config, take, f"encoder.layers.{len(layers)}", filters, 2 * filters, 2 * ratio, stride=ratio))
        filters *= 2
    layers.append(ELU)
    size = config.hidden_size
    layers.append(_conv(config, take, f"encoder.layers.{len(layers)}", filters, size, config.last_kernel_size))
    layers.append(_transformer(config, take, "encoder_transformer"))
    stride = config.latent_stride
    weight = take("downsample.conv.weight", size, size, 2 * stride)
    layers.append(Conv(weight, None, stride, replicate=True))
    return layers


def decoder(config: MimiConfig, take: Take) -> list[Layer]:
    """Layers from latents `[N, F, D]` to sound `[N, S, 1]` in [-1, 1]."""
    size, stride = config.hidden_size, config.latent_stride
    weight = take("upsample.conv.weight", size, size // config.upsample_groups, 2 * stride)
    before: list[Layer] = [Upsample(weight, None, config.upsample_groups), _transformer(config, take, "decoder_transformer")]
    filters = config.num_filters * 2 ** len(config.upsampling_ratios)
    layers: list[Layer] = [_conv(config, take, "decoder.layers.0", size, filters, config.kernel_size)]
    for ratio in config.upsampling_ratios:
        layers.append(ELU)
        name = f"decoder.layers.{len(layers)}.conv"
        weight, bias = take(f"{name}.weight", filters, filters // 2, 2 * ratio), take(f"{name}.bias", filters // 2)
        layers.append(Upsample(weight, bias))
        filters //= 2
        for depth in range(config.num_residual_layers):
            layers.append(_residual(config, take, f"decoder.layers.{len(layers)}", filters, depth))
    layers.append(ELU)
    layers.append(_conv(config, take, f"decoder.layers.{len(layers)}", filters, 1, config.last_kernel_size))
    return [*before, *layers, Activation(partial(torch.clamp, min=-1, max=1))]


def _conv(
    config: MimiConfig, take: Take, name: str, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1
) -> Conv:
    weight, bias = take(f"{name}.conv.weight", outputs, inputs, kernel), take(f"{name}.conv.bias", outputs)
    return Conv(weight, bias, stride, dilation, replicate=config.pad_mode == "replicate")


def _residual(config: MimiConfig, take: Take, name: str, size: int, depth: int) -> Residual:
    inside, kernel, dilation = size // config.compress, config.residual_kernel_size, config.dilation_growth_rate**depth
    wide = _conv(config, take, f"{name}.block.1", size, inside, kernel, dilation=dilation)
    narrow = _conv(config, take, f"{name}.block.3", inside, size, 1)
    shortcut = _conv(config, take, f"{name}.shortcut", size, size, 1) if config.use_conv_shortcut else None
    return Residual([ELU, wide, ELU, narrow], shortcut)


def _transformer(config: MimiConfig, take: Take, name: str) -> Transformer:
    blocks = [_block(config, take, f"{name}.layers.{number}") for number in range(config.num_hidden_layers)]
    device = blocks[0].out.device
    half = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    return Transformer(
        blocks,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.sliding_window,
        eps=config.norm_eps,
        inverse_frequencies=1.0 / config.rope_theta**half,
    )


def _block(config: MimiConfig, take: Take, name: str) -> MimiBlock:
    size, inside, head = config.hidden_size, config.intermediate_size, config.head_size
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}

    def norm(norm_name: str) -> tuple[Tensor, Tensor]:
        return take(f"{name}.{norm_name}.weight", size), take(f"{name}.{norm_name}.bias", size)

    qkv = torch.cat([take(f"{name}.self_attn.{part}_proj.weight", count * head, size) for part, count in heads.items()])
    out = take(f"{name}.self_attn.o_proj.weight", size, config.num_attention_heads * head)
    out_scale, mlp_scale = take(f"{name}.self_attn_layer_scale.scale", size), take(f"{name}.mlp_layer_scale.scale", size)
    qkv_bias = out_bias = None
    if config.attention_bias:
        qkv_bias = torch.cat([take(f"{name}.self_attn.{part}_proj.bias", count * head) for part, count in heads.items()])
        out_bias = take(f"{name}.self_attn.o_proj.bias", size) * out_scale
    return MimiBlock(
        attention_norm=norm("input_layernorm"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out * out_scale[:, None],
        out_bias=out_bias,
        mlp_norm=norm("post_attention_layernorm"),
        up=take(f"{name}.mlp.fc1.weight", inside, size),
        down=take(f"{name}.mlp.fc2.weight", size, inside) * mlp_scale[:, None],
    )


_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_type": (("mimi",), "this folder holds another kind of model"),
    "audio_channels": ((1,), "the codec is mono"),
    "use_causal_conv": ((True,), "a network that looks ahead cannot be streamed"),
    "trim_right_ratio": ((1.0,), "a network that looks ahead cannot be streamed"),
    "hidden_act": (("gelu",), "no other activation is known"),
    "pad_mode": (("constant", "replicate"), "no other can be streamed"),
}
"""Values that a configuration may have, and why no others."""


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

    @property
    def hop(self) -> int:
        """Samples of one position of the transformers."""
        return math.prod(self.upsampling_ratios)

    @property
    def latent_stride(self) -> int:
        """Positions of the transformers in one frame."""
        return 2 if self.frame_rate is None else int(math.ceil(self.sampling_rate / self.hop) / self.frame_rate)

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def read_config(path: Path) -> MimiConfig:
    """Reads `config.json`; UserError for a missing or damaged file, another model_type, or a network that is not Mimi's."""
    entries = read_json(path, "give the codec's folder, fetched again")
    if "model_type" not in entries:
        raise UserError(f"{path} has no model_type: the codec mimi reads folders in the format of kyutai/mimi")
    for key, (values, why) in _ONLY.items():
        if entries.get(key, values[0]) not in values:
            needed = " or ".join(map(repr, values))
            raise UserError(f"{path}: {key} is {entries[key]!r}, and the codec mimi needs {needed}: {why}")
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise UserError(f"{path}: rope_parameters {rope!r} are unknown to the codec mimi: it needs rope_type 'default'")
    known = {field.name for field in fields(MimiConfig)}
    chosen = {key: value for key, value in {**rope, **entries}.items() if key in known}
    if isinstance(chosen.get("upsampling_ratios"), list):
        chosen["upsampling_ratios"] = tuple(chosen["upsampling_ratios"])
    if chosen.get("frame_rate") is None:
        chosen["frame_rate"] = entries.get("_frame_rate")  # where transformers 5 keeps the file's value
    return MimiConfig(**chosen)
