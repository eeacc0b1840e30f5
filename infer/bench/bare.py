"""A bare loop beside the engine: the same shapes and the same kernels, and nothing that a service needs.

One conversation, greedy, of plain calls of PyTorch: no sampling, limits, masks, slots, threads or events. What it takes is what
this machine allows, so that the engine is judged by its ratio to it.
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

from omni.attention import attention
from omni.errors import UserError
from omni.generate.question import Asked, encode_questions
from omni.generate.speech_lm import SpeechLM
from omni.kernels import Kernels, apply, multiply
from omni.model.blocks import Block
from omni.model.int8 import FEWEST, Int8Linear, exact, packed_of
from omni.model.int8_model import Int8Embedding, is_int8
from omni.tasks import TASKS, Turn, prompt

TASK = TASKS["A1A2"]
Product = Callable[[Tensor], Tensor]


class BareLoop:
    """Answers one question again and again, and collects what that took.

    Args:
        sound: the question, [S] at 16 kHz.
        text_assist: a second row writes the text.
        seconds: of the answer's sound; steps: that are taken beyond its own.
        fbgemm: multiply int8 by fbgemm instead of oneDNN.

    Attributes:
        first: seconds from the question's end to the first sound, of each answer; the first answer is left out.
        factors: seconds to the last sound, by those of the sound.
    """

    def __init__(
        self,
        lm: SpeechLM,
        sound: Tensor,
        text_assist: bool,
        seconds: float = 0.0,
        steps: int = 0,
        fbgemm: bool = False,
    ) -> None:
        model, codec = lm.model, lm.codec
        assert codec is not None
        self.lm, self.codec, self.decoder, self.rows = lm, codec, model.decoder, 2 if text_assist else 1
        turn = Turn(TASK, features=model.config.features(len(sound)))
        self.asked = Asked(turn, sound)
        self.columns = prompt(model.layout, turn)
        self.frames = round(seconds * codec.frame_rate)
        config, self.length = model.config.decoder, len(self.columns) + self.frames + model.layout.max_delay + steps + 1
        if self.length > config.context:
            raise UserError(
                f"an answer of {seconds:g} s does not fit the model's context of {config.context}; lower --answer_seconds"
            )
        product = self.product = partial(_product, fbgemm=fbgemm)
        self.blocks = [_BareBlock(block, self) for block in (*self.decoder.blocks, *self.decoder.post_blocks)]
        angle = torch.arange(self.length, device=model.device)[:, None] * self.decoder.rope
        self.rope = tuple(torch.cat([f, f], -1)[:, None] for f in (angle.cos(), angle.sin()))  # [T, 1, D]
        table = self.decoder.text_embedding if self.decoder.text_head is None else self.decoder.text_head
        self.text_head, self.audio_head = (
            product(self.decoder.kernels, table),
            product(self.decoder.kernels, self.decoder.audio_head),
        )
        self.first: list[float] = []
        self.factors: list[float] = []

    def hidden(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Hidden states for the text head and for the audio head of the last of T columns x [B, T, W] from a position on."""
        for block in self.blocks[: len(self.decoder.blocks)]:
            x = block(x, start)
        text = audio = normed(self.decoder.norm, x[:, -1:])
        if self.decoder.post_norm is not None:
            for block in self.blocks[len(self.decoder.blocks) :]:
                x = block(x, start)
            audio = normed(self.decoder.post_norm, x[:, -1:])
        return text, audio

    def prefill(self) -> tuple[Tensor, Tensor]:
        """Hidden states after the question."""
        (features,) = encode_questions(self.lm.model, [self.asked])
        asked = self.columns
        text, audio = self.hidden(self.decoder.embed(asked.tokens[None], features, asked.feature_index[None]), 0)
        for block in self.blocks if self.rows > 1 else ():
            block.keys[1:], block.values[1:] = block.keys[:1], block.values[:1]
        return text.expand(self.rows, -1, -1), audio.expand(self.rows, -1, -1)

    def column(self, text: Tensor, audio: Tensor) -> Tensor:
        """The likeliest tokens [rows, K, 1]; the last row's text, and the first row's audio."""
        streams = self.decoder.split_audio(self.audio_head(audio[:1]))
        codes = [logits.argmax(-1) for logits in streams]
        return torch.cat([*codes, self.text_head(text[-1:]).argmax(-1)])[None].expand(self.rows, -1, -1)

    def step(self, tokens: Tensor, position: int) -> Tensor:
        """The next column."""
        return self.column(*self.hidden(self.decoder.embed(tokens), position))

    def stepping(self) -> Callable[[int], None]:
        """Prefill the question; returns what takes a number of the next steps."""
        with torch.inference_mode():
            tokens, at = self.column(*self.prefill()), len(self.columns)

        @torch.inference_mode()
        def steps(number: int) -> None:
            nonlocal tokens, at
            for _ in range(number):
                tokens, at = self.step(tokens, at), at + 1

        return steps

    def answers(self, number: int) -> None:
        """Answer a number of times, once of it to warm up at first."""
        warm = bool(self.factors)
        for _ in range(number):
            self._answer()
        if not warm:
            del self.first[0], self.factors[0]

    @torch.inference_mode()
    def _answer(self) -> None:
        stream, sounding, heard = self.codec.stream(), 0, 0
        begin = time.perf_counter()
        tokens = self.column(*self.prefill())
        for number in range(self.lm.layout.max_delay + self.frames - 1):
            tokens = self.step(tokens, len(self.columns) + number)
            if number >= self.lm.layout.max_delay - 1:
                sizes = torch.tensor(self.codec.codebook_sizes, device=tokens.device)
                samples = stream.push(torch.minimum(tokens[0, :-1], sizes[:, None] - 1))
                heard += len(samples)
                if heard and not sounding:
                    sounding = 1
                    self.first.append(time.perf_counter() - begin)
        stream.finish()
        self.factors.append((time.perf_counter() - begin) * self.codec.frame_rate / self.frames)


def bare_loops(lm: SpeechLM, sound: Tensor, text_assist: bool, seconds: float = 0.0, steps: int = 0) -> dict[str, BareLoop]:
    """The loops that a model is compared with, by what they are called: none on a GPU; in int8 also one by fbgemm."""
    if lm.model.device.type != "cpu":
        return {}
    loops = {"a bare loop": BareLoop(lm, sound, text_assist, seconds, steps)}
    if is_int8(lm.model) and "fbgemm" in torch.backends.quantized.supported_engines:
        loops["one by fbgemm"] = BareLoop(lm, sound, text_assist, seconds, steps, fbgemm=True)
    return loops


class _BareBlock:
    """A block with its keys and values [rows, G, S, D]."""

    def __init__(self, block: nn.Module, loop: BareLoop) -> None:
        assert isinstance(block, Block)
        self.loop, self.block, part, mlp, product = loop, block, block.attention, block.mlp, loop.product
        self.qkv = product(part.kernels, part.q, part.k, part.v)
        self.out = product(part.kernels, part.out)
        self.gate_up, self.down = product(mlp.kernels, mlp.gate, mlp.up), product(mlp.kernels, mlp.down)
        norm = block.attention_norm.weight
        shape = (loop.rows, part.kv_heads, loop.length, part.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=norm.dtype, device=norm.device) for _ in "kv")

    def __call__(self, x: Tensor, start: int) -> Tensor:
        part, (rows, time, _) = self.block.attention, x.shape
        end = start + time
        qkv = self.qkv(normed(self.block.attention_norm, x)).view(rows, time, -1, part.head_dim)
        q, k, v = qkv.split([part.heads, part.kv_heads, part.kv_heads], 2)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = normed(part.q_norm, q), normed(part.k_norm, k)
        cos, sin = (f[start:end] for f in self.loop.rope)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        self.keys[:rows, :, start:end], self.values[:rows, :, start:end] = k.transpose(1, 2), v.transpose(1, 2)
        keys, values = self.keys[:rows, :, :end], self.values[:rows, :, :end]
        y = attention(q.transpose(1, 2), keys, values, causal=time > 1, grouped=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(normed(self.block.mlp_norm, x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, D] turned by cos and sin [T, 1, D], or [B, T, 1, D]."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)


def _product(kernels: Kernels | None, *linears: nn.Module, fbgemm: bool) -> Product:
    """The product of linears (or a tied table) of one input, as the model holds and multiplies them."""
    if isinstance(linears[0], Int8Embedding):
        linears = (linears[0].head(),)
    first = linears[0]
    if isinstance(first, Int8Linear) and (fbgemm or exact()):
        return (_fbgemm_product if fbgemm else _int8_product)(cast("tuple[Int8Linear, ...]", linears))
    if isinstance(first, nn.Embedding):
        return partial(multiply, kernels, weight=first.weight)
    parts = cast("tuple[nn.Linear, ...]", linears)
    return lambda x: (
        torch.cat([apply(kernels, part, x) for part in parts], -1) if len(parts) > 1 else apply(kernels, parts[0], x)
    )


def _int8_product(linears: tuple[Int8Linear, ...]) -> Product:
    """Rows in int8 by their largest number, oneDNN's product, and the scales."""
    weight, scale, bias = packed_of(linears)
    zeros, multiply_int8 = torch.zeros(len(scale), dtype=torch.int64), torch.ops.onednn.qlinear_pointwise.default
    middle = torch.full((linears[0].in_features,), 128.5)

    def product(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).float()
        most, count = rows.abs().amax(1, keepdim=True), len(rows)
        held = torch.empty(max(count, FEWEST), rows.shape[1], dtype=torch.uint8)
        numbers = torch.addcdiv(middle, rows, most, value=127)
        held[:count] = numbers if count < FEWEST else numbers.to(torch.int32)  # which is faster for many
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
