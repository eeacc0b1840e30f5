"""Mimi's encoder, quantizer and decoder, built of the tensors of its file.

    sound -> encoder: convolutions, transformer, downsampling -> latents [F, D] -> quantizer -> codes [K, F]
    codes -> quantizer -> latents [F, D] -> decoder: upsampling, transformer, convolutions -> sound

The quantizer is split: the first codebook (the semantic one, distilled from a speech encoder) and the residual codebooks
after it each start from the same latent; decoded, both parts are summed. Names of tensors are those of kyutai/mimi's
`model.safetensors`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from omni.codec.mimi_config import MimiConfig
from omni.codec.mimi_stream import Block, Conv, Elu, Layer, Residual, Transformer, Upsample

SMALLEST_USAGE = 1e-5
"""Codes that training never used are divided by this."""


class Take(Protocol):
    """Gives the tensor `name`, which must have `shape`: float32, where the codec computes."""

    def __call__(self, name: str, *shape: int) -> Tensor: ...


class Codebooks(NamedTuple):
    """One residual part of the quantizer: `tables` [N, d] each, between projections [d, D] and [D, d] (or none)."""

    tables: tuple[Tensor, ...]
    project_in: Tensor | None
    project_out: Tensor | None

    def encode(self, latents: Tensor) -> Tensor:
        """Codes `[n, F]` of latents `[F, D]`: each codebook's entry nearest to what those before it leave over."""
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


class Quantizer(NamedTuple):
    """The split quantizer, with the codebooks that are in use."""

    parts: tuple[Codebooks, ...]

    def encode(self, latents: Tensor) -> Tensor:
        """Codes `[K, F]` of latents `[F, D]`."""
        return torch.cat([part.encode(latents) for part in self.parts])

    def decode(self, codes: Tensor) -> Tensor:
        """Latents `[F, D]` of codes `[K, F]`."""
        rows = codes.split([len(part.tables) for part in self.parts])
        return torch.stack([part.decode(own) for part, own in zip(self.parts, rows, strict=True)]).sum(0)


def quantizer(config: MimiConfig, take: Take, codebooks: int) -> Quantizer:
    """The quantizer with the first `codebooks` of its codebooks."""
    semantic = min(codebooks, config.num_semantic_quantizers)
    counts = {"semantic": semantic, "acoustic": codebooks - semantic}
    return Quantizer(tuple(_codebooks(config, take, name, count) for name, count in counts.items() if count))


def encoder(config: MimiConfig, take: Take, chunk: int) -> list[Layer]:
    """Sound `[S, 1]` to latents `[F, D]`; `chunk` is the most frames that one call brings."""
    filters = config.num_filters
    layers: list[Layer] = [_conv(config, take, "encoder.layers.0", 1, filters, config.kernel_size)]
    for ratio in reversed(config.upsampling_ratios):
        for depth in range(config.num_residual_layers):
            layers.append(_residual(config, take, f"encoder.layers.{len(layers)}", filters, depth))
        layers.append(Elu())
        layers.append(_conv(config, take, f"encoder.layers.{len(layers)}", filters, 2 * filters, 2 * ratio, stride=ratio))
        filters *= 2
    layers.append(Elu())
    size = config.hidden_size
    layers.append(_conv(config, take, f"encoder.layers.{len(layers)}", filters, size, config.last_kernel_size))
    layers.append(_transformer(config, take, "encoder_transformer", chunk))
    stride = config.latent_stride
    weight = take("downsample.conv.weight", size, size, 2 * stride)
    layers.append(Conv.of(weight, None, stride, replicate=True))
    return layers


def decoder(config: MimiConfig, take: Take) -> list[Layer]:
    """Latents `[F, D]` to sound `[S, 1]`, one frame a call."""
    size, stride = config.hidden_size, config.latent_stride
    weight = take("upsample.conv.weight", size, size // config.upsample_groups, 2 * stride)
    before: list[Layer] = [
        Upsample.of(weight, None, config.upsample_groups),
        _transformer(config, take, "decoder_transformer", 1),
    ]
    filters = config.num_filters * 2 ** len(config.upsampling_ratios)
    layers: list[Layer] = [_conv(config, take, "decoder.layers.0", size, filters, config.kernel_size)]
    for ratio in config.upsampling_ratios:
        layers.append(Elu())
        name = f"decoder.layers.{len(layers)}.conv"
        weight, bias = take(f"{name}.weight", filters, filters // 2, 2 * ratio), take(f"{name}.bias", filters // 2)
        layers.append(Upsample.of(weight, bias))
        filters //= 2
        for depth in range(config.num_residual_layers):
            layers.append(_residual(config, take, f"decoder.layers.{len(layers)}", filters, depth))
    layers.append(Elu())
    layers.append(_conv(config, take, f"decoder.layers.{len(layers)}", filters, 1, config.last_kernel_size))
    return before + layers


def _conv(
    config: MimiConfig, take: Take, name: str, inputs: int, outputs: int, kernel: int, stride: int = 1, dilation: int = 1
) -> Conv:
    weight, bias = take(f"{name}.conv.weight", outputs, inputs, kernel), take(f"{name}.conv.bias", outputs)
    return Conv.of(weight, bias, stride, dilation, replicate=config.pad_mode == "replicate")


def _residual(config: MimiConfig, take: Take, name: str, size: int, depth: int) -> Residual:
    inside, kernel, dilation = size // config.compress, config.residual_kernel_size, config.dilation_growth_rate**depth
    wide = _conv(config, take, f"{name}.block.1", size, inside, kernel, dilation=dilation)
    narrow = _conv(config, take, f"{name}.block.3", inside, size, 1)
    shortcut = _conv(config, take, f"{name}.shortcut", size, size, 1) if config.use_conv_shortcut else None
    return Residual((Elu(), wide, Elu(), narrow), shortcut)


def _transformer(config: MimiConfig, take: Take, name: str, frames: int) -> Transformer:
    blocks = [_block(config, take, f"{name}.layers.{number}") for number in range(config.num_hidden_layers)]
    device = blocks[0].out.device
    half = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    return Transformer(
        tuple(blocks),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.sliding_window,
        chunk=frames * config.latent_stride,
        eps=config.norm_eps,
        inverse_frequencies=1.0 / config.rope_theta**half,
    )


def _block(config: MimiConfig, take: Take, name: str) -> Block:
    size, inside, head = config.hidden_size, config.intermediate_size, config.head_size
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}

    def norm(which: str) -> tuple[Tensor, Tensor]:
        return take(f"{name}.{which}.weight", size), take(f"{name}.{which}.bias", size)

    qkv = torch.cat([take(f"{name}.self_attn.{part}_proj.weight", count * head, size) for part, count in heads.items()])
    out = take(f"{name}.self_attn.o_proj.weight", size, config.num_attention_heads * head)
    out_scale, mlp_scale = take(f"{name}.self_attn_layer_scale.scale", size), take(f"{name}.mlp_layer_scale.scale", size)
    qkv_bias = out_bias = None
    if config.attention_bias:
        qkv_bias = torch.cat([take(f"{name}.self_attn.{part}_proj.bias", count * head) for part, count in heads.items()])
        out_bias = take(f"{name}.self_attn.o_proj.bias", size) * out_scale
    return Block(
        attention_norm=norm("input_layernorm"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out * out_scale[:, None],
        out_bias=out_bias,
        mlp_norm=norm("post_attention_layernorm"),
        up=take(f"{name}.mlp.fc1.weight", inside, size),
        down=take(f"{name}.mlp.fc2.weight", size, inside) * mlp_scale[:, None],
    )


def _codebooks(config: MimiConfig, take: Take, name: str, count: int) -> Codebooks:
    name, size, inside = (
        f"quantizer.{name}_residual_vector_quantizer",
        config.hidden_size,
        config.vector_quantization_hidden_dimension,
    )
    tables = []
    for layer in range(count):
        total = take(f"{name}.layers.{layer}.codebook.embed_sum", config.codebook_size, inside)
        usage = take(f"{name}.layers.{layer}.codebook.cluster_usage", config.codebook_size)
        tables.append(total / usage.clamp(min=SMALLEST_USAGE)[:, None])
    if inside == size:
        return Codebooks(tuple(tables), None, None)
    project_in, project_out = (
        take(f"{name}.input_proj.weight", inside, size, 1),
        take(f"{name}.output_proj.weight", size, inside, 1),
    )
    return Codebooks(tuple(tables), project_in[:, :, 0], project_out[:, :, 0])
