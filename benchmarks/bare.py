"""A bare loop: the same shapes and the same kernels as the engine, and nothing that a service needs.

Greedy rows of plain calls of PyTorch in one thread: no processes, events, sampling, limits or slots. What it takes is what this
machine allows. Rows may stand at different positions, as those of people who talk do (`benchmarks.people`).

Dimensions: N rows, T columns, K streams, W width, H heads, G key/value heads, S positions, D size of a head.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.bench.bench import TASK
from omni.cpu import linear
from omni.cpu.int8 import FEWEST, Int8Embedding, Int8Linear, exact, packed_of
from omni.generate.question import Asked, encode_questions
from omni.generate.speech_lm import SpeechLM
from omni.model.attention import attention
from omni.model.blocks import Block
from omni.tasks import Turn, prompt

Product = Callable[[Tensor], Tensor]


class BareLoop:
    """Rows of a model, each with S positions, and the last column that was chosen for each: `tokens` [N, K, 1].

    Args:
        fbgemm: multiply int8 by fbgemm instead of oneDNN: a yardstick, which rounds all rows alike.
    """

    def __init__(self, lm: SpeechLM, question: Tensor, rows: int, length: int, fbgemm: bool = False) -> None:
        model, codec = lm.model, lm.codec
        assert codec is not None
        self.model, self.codec, self.decoder, self.delay = model, codec, model.decoder, model.layout.max_delay
        turn = Turn(TASK, features=model.config.features(len(question)))
        self.asked, self.columns = Asked(turn, question), prompt(model.layout, turn)
        self.product = product = partial(_product, fbgemm=fbgemm)
        self.blocks = [_BareBlock(block, self, rows, length) for block in (*self.decoder.blocks, *self.decoder.post_blocks)]
        angle = torch.arange(length, device=model.device)[:, None] * self.decoder.rope
        self.rope = [torch.cat([f, f], -1)[:, None] for f in (angle.cos(), angle.sin())]  # [S, 1, D]
        table = self.decoder.text_embedding if self.decoder.text_head is None else self.decoder.text_head
        self.heads = product(self.decoder.fast, table), product(self.decoder.fast, self.decoder.audio_head)
        self.tokens = torch.zeros(rows, len(model.layout), 1, dtype=torch.long, device=model.device)
        self.sizes = torch.tensor(codec.codebook_sizes, device=model.device)

    def hidden(self, x: Tensor, rows: slice, position: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [N, 1, W] of the last of columns x [N, T, W] at positions [N, T], for the text and the audio head."""
        end, first = int(position.max()) + 1, int(position[0, 0])
        alike = len({*position[:, 0].tolist()}) == 1 and (x.shape[1] == 1 or first == 0)
        mask = None if alike else (torch.arange(end, device=x.device) <= position[:, :, None])[:, None]
        turns = [part[position] for part in self.rope]  # [N, T, 1, D]
        for block in self.blocks[: len(self.decoder.blocks)]:
            x = block(x, rows, position, mask, turns)
        text = audio = normed(self.decoder.norm, x[:, -1:])
        if self.decoder.post_norm is not None:
            for block in self.blocks[len(self.decoder.blocks) :]:
                x = block(x, rows, position, mask, turns)
            audio = normed(self.decoder.post_norm, x[:, -1:])
        return text, audio

    def choose(self, text: Tensor, audio: Tensor, rows: slice) -> None:
        """Chooses the likeliest tokens as the next columns."""
        streams = self.heads[1](audio).split([stream.vocabulary for stream in self.decoder.layout.audio], -1)
        self.tokens[rows] = torch.stack([*(stream.argmax(-1) for stream in streams), self.heads[0](text).argmax(-1)], 1)

    def prefill(self, rows: slice, ends: list[int], kept: int = 0) -> None:
        """Encodes the question for rows that end after it, with that many columns before it fed again, and chooses a column."""
        count, length = len(ends), len(self.columns)
        features = [f for f in encode_questions(self.model, [self.asked] * count) if f is not None]
        pad = self.model.layout.ids("pad")[None, :, None].expand(count, -1, kept)
        tokens = torch.cat([pad, self.columns.tokens[None].expand(count, -1, -1)], 2)
        index, each = self.columns.feature_index, self.asked.turn.features
        index = torch.stack([torch.where(index >= 0, index + n * each, -1) for n in range(count)])
        x = self.decoder.embed(tokens, torch.cat(features), F.pad(index, (kept, 0), value=-1))
        position = torch.tensor(ends)[:, None] + torch.arange(-kept - length, 0)
        self.choose(*self.hidden(x, rows, position), rows)

    def step(self, positions: list[int]) -> None:
        """Feeds the chosen columns of the first rows, and chooses the next."""
        rows = slice(0, len(positions))
        x = self.decoder.embed(self.tokens[rows])
        self.choose(*self.hidden(x, rows, torch.tensor(positions)[:, None]), rows)

    def frame(self, row: slice) -> Tensor:
        """Codes [N, K-1] of the columns that were chosen last."""
        return torch.minimum(self.tokens[row, :-1, 0], self.sizes - 1)

    def move(self, source: int, target: int, positions: int) -> None:
        """Puts a row in another's place."""
        self.tokens[target] = self.tokens[source]
        for block in self.blocks:
            for held in (block.keys, block.values):
                held[target, :, :positions] = held[source, :, :positions]


@torch.inference_mode()
def answer(loop: BareLoop, frames: int) -> tuple[float, float]:
    """Answers the question; returns seconds to the first sound, and to the last over those of the sound."""
    begin, first, rows = time.perf_counter(), 0.0, len(loop.tokens)
    stream, at = loop.codec.stream(), len(loop.columns)
    loop.prefill(slice(0, 1), [at])
    for row in range(1, rows):
        loop.move(0, row, at)
    for number in range(1, loop.delay + frames):
        loop.step([at + number - 1] * rows)
        if number >= loop.delay and len(stream.push(loop.frame(slice(0, 1)).T)) and not first:
            first = time.perf_counter() - begin
    stream.finish()
    return first, (time.perf_counter() - begin) * loop.codec.frame_rate / frames


class _BareBlock:
    """A block with its keys and values [N, G, S, D]."""

    def __init__(self, block: nn.Module, loop: BareLoop, rows: int, length: int) -> None:
        assert isinstance(block, Block)
        self.block, part, mlp, product = block, block.attention, block.mlp, loop.product
        self.qkv, self.out = product(part.fast, part.q, part.k, part.v), product(part.fast, part.out)
        self.gate_up, self.down = product(mlp.fast, mlp.gate, mlp.up), product(mlp.fast, mlp.down)
        norm = block.attention_norm.weight
        shape = (rows, part.kv_heads, length, part.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=norm.dtype, device=norm.device) for _ in "kv")

    def __call__(self, x: Tensor, rows: slice, position: Tensor, mask: Tensor | None, turns: list[Tensor]) -> Tensor:
        part, (count, columns, _) = self.block.attention, x.shape
        qkv = self.qkv(normed(self.block.attention_norm, x)).view(count, columns, -1, part.head_dim)
        q, k, v = qkv.split([part.heads, part.kv_heads, part.kv_heads], 2)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = normed(part.q_norm, q), normed(part.k_norm, k)
        q, k = rotated(q, *turns), rotated(k, *turns)
        end, keys, values = int(position.max()) + 1, self.keys[rows], self.values[rows]
        if columns == 1 and mask is not None:
            every = torch.arange(count)
            keys[every, :, position[:, 0]], values[every, :, position[:, 0]] = k[:, 0], v[:, 0]
        else:
            for n, low in enumerate(position[:, 0].tolist()):
                keys[n, :, low : low + columns], values[n, :, low : low + columns] = k[n].transpose(0, 1), v[n].transpose(0, 1)
        keys, values = keys[:, :, :end], values[:, :, :end]
        y = attention(q.transpose(1, 2), keys, values, mask, columns > 1 and mask is None, grouped=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(normed(self.block.mlp_norm, x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """RMSNorm by PyTorch's own call."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D] turned by cos and sin [B, T, 1, D]."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def _product(fast: bool, *linears: nn.Module, fbgemm: bool) -> Product:
    """The product of linears (or a tied table) of one input, as the model holds and multiplies them."""
    if isinstance(linears[0], Int8Embedding):
        linears = (linears[0].head(),)
    first = linears[0]
    if isinstance(first, Int8Linear) and (fbgemm or exact()):
        return (_fbgemm_product if fbgemm else _int8_product)(cast("tuple[Int8Linear, ...]", linears))
    return lambda x: torch.cat([linear(fast, part, x) for part in linears], -1) if len(linears) > 1 else linear(fast, first, x)


def _int8_product(linears: tuple[Int8Linear, ...]) -> Product:
    """Rows in int8 by their largest number, oneDNN's product, and the scales."""
    weight, scale, bias = packed_of(linears)
    zeros, multiply_int8 = torch.zeros(len(scale), dtype=torch.int64), torch.ops.onednn.qlinear_pointwise.default
    middle = torch.full((linears[0].in_features,), 128.5)

    def product(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).float()
        most, count = rows.abs().amax(1, keepdim=True), len(rows)
        held = torch.empty(max(count, FEWEST), rows.shape[1], dtype=torch.uint8)
        quantized = torch.addcdiv(middle, rows, most, value=127)
        held[:count] = quantized if count < FEWEST else quantized.to(torch.int32)  # which is faster for many
        out = multiply_int8(held, 1.0, 128, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")[:count]
        out = out.mul_(most) if bias is None else torch.addcmul(bias, out, most)
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    return product


def _fbgemm_product(linears: tuple[Int8Linear, ...]) -> Product:
    """fbgemm's product, which rounds all rows of its input alike. A yardstick: PyTorch deprecates it."""
    weight, scale = (torch.cat([getattr(part, name).detach() for part in linears]) for name in ("weight", "scale"))
    bias = packed_of(linears).bias
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = torch._make_per_channel_quantized_tensor(
                weight, scale.double(), torch.zeros(len(scale), dtype=torch.long), 0
            )
            held = torch.ops.quantized.linear_prepack(whole, bias)
    finally:
        torch.backends.quantized.engine = before
    multiply_int8 = torch.ops.quantized.linear_dynamic.default
    return lambda x: multiply_int8(x.float(), held, True).to(x.dtype)
