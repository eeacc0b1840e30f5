"""A step of the decoder on a CPU, one column of each row, compiled (`omni.cpu.compiled`) where `omni.cpu` says so.

In float32 a small model's blocks are a single call, and in int8 there is one between two products. The float32 weights of one
input become views of one tensor, so that what changes them in place changes it. A block beside whose parts something acts (an
adapter, an edit, a hook), or that is of another kind, is run as it is, between the others.

Dimensions: B rows, K streams, W width, D size of a head, V slots that are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from omni.cpu import SMALL, compiled, compiled_int8
from omni.cpu.int8 import Int8Linear, packed_of, raw_product
from omni.model.blocks import Attention, Block, RMSNorm, SwiGLU
from omni.model.kv_cache import KVCache
from omni.model.linears import fuse_weights
from omni.utils.private import children, forward_hooks, has_forward_hooks, own_parameters

LOG = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
_NONE, _NO_ROWS = np.empty(0, np.float32), np.empty((0, 0), np.float32)


class DecoderStep:
    """The compiled step of one decoder."""

    def __init__(self) -> None:
        self._blocks: list[_BlockStep] = []

    def __reduce__(self) -> tuple[type[DecoderStep], tuple[()]]:
        return DecoderStep, ()  # a copy of the decoder has other weights

    @torch.inference_mode()
    def prepare(self, model: Any) -> None:
        """Compile what a model's steps take before the first question: half a minute once on a processor, then read from
        numba's cache."""
        decoder = model.decoder
        if not decoder.fast or all(step_shape(block) is None for block in decoder.blocks):
            return
        LOG.info("compiling steps; the first time on a processor it takes half a minute")
        column = torch.zeros(1, len(decoder.layout), 1, dtype=torch.long)
        decoder.logits(decoder(column, input_pos=torch.zeros(1, 1, dtype=torch.long), cache=model.make_cache(1, 1)))

    def __call__(self, decoder: Any, tokens: Tensor, input_pos: Tensor, cache: KVCache) -> tuple[Tensor, Tensor] | None:
        """Hidden states [B, 1, W] for the text head and for the audio heads, as the `forward` of a `Decoder` gives them for
        tokens [B, K, 1]; None of several columns, and where no block is compiled."""
        if tokens.shape[2] > 1 or not self._compiles(decoder, decoder.norm.weight) or cache.dtype != torch.float32:
            return None  # while autograd records, the cache's `update` refuses to be written
        first, blocks = len(decoder.blocks), [*decoder.blocks, *decoder.post_blocks]
        if len(self._blocks) != len(blocks):
            self._blocks = [_BlockStep() for _ in blocks]
        steps = [step if step.matches(block) else None for step, block in zip(self._blocks, blocks, strict=True)]
        x = self._embed(decoder, tokens) if any(steps) else None
        if x is None:
            return None
        rows = len(x)
        mask = cache.write_slots_and_mask(input_pos)
        cos, sin = (np.empty((rows, 2 * len(decoder.rope)), np.float32) for _ in range(2))
        inputs = _Inputs(cache, mask.numpy().reshape(rows, -1), cos, sin)
        compiled.rope_cos_sin(np.ascontiguousarray(input_pos.numpy()[:, 0]), decoder.rope.numpy(), cos, sin)
        outputs = list[Tensor]()
        for norm, layers in ((decoder.norm, range(first)), (decoder.post_norm, range(first, len(blocks)))):
            if layers.start and decoder.post_input is not None:
                outputs[0] = torch.where(decoder.written(tokens)[..., None], outputs[0], 0)
                x = decoder.talker_input(outputs[0], tokens)[:, 0].numpy().copy()
            for shape, run in groupby(layers, lambda layer: None if (step := steps[layer]) is None else step.shape):
                neighbours = [*run]
                if shape is not None and shape.dtype == "float32":
                    _take(neighbours, blocks, self._blocks, x, inputs)
                    continue
                for layer in neighbours:
                    if shape is not None:
                        self._blocks[layer](blocks[layer], x, inputs, layer)
                    else:
                        rope = tuple(torch.from_numpy(part)[:, None, None] for part in (cos, sin))
                        y = blocks[layer](torch.from_numpy(x)[:, None], rope, mask, cache, layer)
                        x = y.numpy()[:, 0].copy()  # which the next one changes
            if norm is not None:
                outputs.append(_normed(norm, x))
        return outputs[0], outputs[-1]

    def _compiles(self, decoder: Any, *tensors: Tensor) -> bool:
        if not decoder.fast or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return False
        return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)

    def logits(self, decoder: Any, head: nn.Module, x: Tensor) -> Tensor | None:
        """Products [..., V] of hidden states x [..., W] and a small head, or tied table; None where the decoder's blocks are
        not compiled in float32."""
        weight: Any = head.weight
        if type(head) not in (nn.Linear, nn.Embedding) or has_forward_hooks(head) or type(weight) is not nn.Parameter:
            return None
        if getattr(head, "bias", None) is not None or weight.numel() > SMALL or not self._compiles(decoder, x, weight):
            return None
        (step,) = self._blocks[:1] or [_BlockStep()]
        if not len(decoder.blocks) or not step.matches(decoder.blocks[0]) or step.shape.dtype != "float32":
            return None
        # Of arrays whose numbers are no neighbours, what is compiled is compiled again.
        rows, table = (np.ascontiguousarray(part.numpy(force=True)) for part in (x.flatten(0, -2), weight))
        out = np.empty((len(rows), len(table)), np.float32)
        compiled.logits(rows, table, out)
        return torch.from_numpy(out.reshape(*x.shape[:-1], -1))

    def _embed(self, decoder: Any, tokens: Tensor) -> Array | None:
        """Embeddings [B, W] of one column, in memory of their own; None where they are not float32."""
        tables = decoder.audio_embedding, decoder.text_embedding
        if decoder.post_input is not None or any(
            type(table) is not nn.Embedding or has_forward_hooks(table) for table in tables
        ):
            x = decoder.embed(tokens)[:, 0]
            return x.numpy().copy() if x.dtype == torch.float32 else None
        audio, text = (table.weight.numpy(force=True) for table in tables)
        out = np.empty((tokens.shape[0], text.shape[1]), np.float32)
        scale = np.float32(1 / len(decoder.layout) if decoder.config.combine == "mean" else 1)
        own = np.ascontiguousarray(tokens.numpy()[:, :, 0])
        compiled.embed(own, decoder.offsets.numpy()[:, 0], audio, text, scale, out)
        return out


def _normed(norm: nn.RMSNorm, x: Array) -> Tensor:
    """x [B, W] normed, as [B, 1, W]; in memory of its own."""
    if type(norm) is not RMSNorm or has_forward_hooks(norm):
        hidden: Tensor = norm(torch.from_numpy(x.copy())[:, None])
        return hidden
    out = np.empty_like(x)
    compiled.norm_rows(x, norm.weight.numpy(force=True), np.float32(norm.eps), out)
    return torch.from_numpy(out[:, None])


class _Inputs:
    """What the blocks of a step share: the cache, what is added to the scores [B, V], and the rotary table [B, D]."""

    def __init__(self, cache: KVCache, mask: Array, cos: Array, sin: Array) -> None:
        self.cache, self.writes = cache, cache.writes.numpy()
        self.mask, self.cos, self.sin = mask, cos, sin
        self._shared: tuple[compiled_int8.SharedAttention, Array, Array, Array] | None = None

    def attention(self, heads: int) -> tuple[compiled_int8.SharedAttention, Array, Array, Array]:
        """The task of threads for an attention of so many heads, without keys and values; the rows that do not rest [N], and
        memory for their queries, keys and values and for the result, [N, (H + 2 G) D] and [N, H D]. The same for each block."""
        if self._shared is None:
            of, slots, kv_heads, size = self.cache.keys[0].shape
            active = compiled.active_of(self.writes, slots)
            wide = np.empty((len(active), (heads + 2 * kv_heads) * size), np.float32)
            y = np.empty((len(active), heads * size), np.float32)
            task = compiled_int8.SharedAttention(
                0, len(active), len(self.writes), of, slots, heads, kv_heads, size, self.mask.shape[1], self.cache.ring,
                *(held.ctypes.data for held in (active, self.writes, self.mask, wide)), 0, 0, y.ctypes.data,
            )  # fmt: skip
            self._shared = task, active, wide, y
        return self._shared


def _take(layers: Sequence[int], blocks: Sequence[Any], steps: Sequence[_BlockStep], x: Array, inputs: _Inputs) -> None:
    """Take x [B, W] through float32 blocks of one shape, which are neighbours, in place."""
    block, cache, shape = blocks[layers[0]], inputs.cache, steps[layers[0]].shape
    part, (rows, slots, *_) = block.attention, cache.keys[0].shape
    addresses = [[*steps[at].addresses, cache.keys[at].data_ptr(), cache.values[at].data_ptr()] for at in layers]
    compiled.blocks(
        x, inputs.writes, cache.ring, inputs.mask, inputs.cos, inputs.sin, np.float32(block.attention_norm.eps),
        np.array(addresses), part.q.bias is not None, part.q_norm is not None, shape.mlp_width, rows, slots, shape.heads,
        shape.kv_heads,
    )  # fmt: skip


class _Fingerprint:
    """The modules and parameters beneath a module, itself among them, as they are: to compare them all takes as long as a small
    model's block."""

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._children = [(children(part), [*children(part).values()]) for part in modules]
        self._own = [(own_parameters(part), [*map(id, own_parameters(part).values())]) for part in modules]
        self._weights = [p for part in modules for p in own_parameters(part).values() if p is not None]
        self._addresses = [weight.data_ptr() for weight in self._weights]
        self.hooks = [hooks for part in modules for hooks in forward_hooks(part)]

    def same(self) -> bool:
        """Whether all of them are there still, and no others, with their numbers where they were."""
        return (
            all([*now.values()] == before for now, before in self._children)
            and all([*map(id, now.values())] == before for now, before in self._own)
            and [weight.data_ptr() for weight in self._weights] == self._addresses
        )


class _BlockStep:
    """The compiled step of one block.

    Attributes:
        shape: None where it cannot be compiled; float32 blocks of one shape are taken together.
        addresses: of the weights that are read as arrays; of a float32 block in the order of `compiled.blocks`.
    """

    def __init__(self) -> None:
        self._block: nn.Module | None = None
        self._parts: _Fingerprint | None = None
        self.shape: Any = None
        self.addresses: list[int] = []
        self._held: list[Array] = []

    def matches(self, block: nn.Module) -> bool:
        """Whether the block is compiled: it can be, and nothing acts beside a part."""
        if block is not self._block or self._parts is None or not self._parts.same():
            self._look(block)
        return self.shape is not None and not any(self._parts.hooks)  # type: ignore[union-attr]

    def _look(self, block: Any) -> None:
        """Take the block's weights as arrays, where they can be; those of one input become parts of one."""
        shape, arrays = step_shape(block), list[Array]()
        if shape is not None:
            part, mlp = block.attention, block.mlp
            norms = block.attention_norm, part.q_norm, part.k_norm, block.mlp_norm
            groups: list[list[Tensor]] = [[] if norm is None else [norm.weight] for norm in norms]
            if shape.dtype == "float32":
                qkv, (attention_norm, q_norm, k_norm, mlp_norm) = (part.q, part.k, part.v), groups
                biases = [linear.bias for linear in qkv if linear.bias is not None]
                groups = [attention_norm, [linear.weight for linear in qkv], biases, q_norm, k_norm, [part.out.weight]]
                groups += [mlp_norm, [mlp.gate.weight, mlp.up.weight], [mlp.down.weight]]
            weights = [weight for group in groups for weight in group]
            if any(type(w) is not nn.Parameter or w.dtype != torch.float32 or w.device.type != "cpu" for w in weights):
                shape = None
            else:
                with torch.inference_mode(False), torch.no_grad():
                    arrays = [fuse_weights(group).numpy() if group else _NONE for group in groups]
        addresses = [array.ctypes.data for array in arrays]
        # Of this thread: another may do the same at once.
        self._block, self._parts, self.shape, self._held, self.addresses = block, _Fingerprint(block), shape, arrays, addresses

    def __call__(self, block: nn.Module, x: Array, inputs: _Inputs, layer: int) -> None:
        """Take x [B, W] through a block in int8, in place."""
        part: Any = block.attention
        mlp: Any = block.mlp
        attention_norm, q_norm, k_norm, mlp_norm = self._held
        cache, rows, eps = inputs.cache, len(x), np.float32(block.attention_norm.eps)  # type: ignore[union-attr, arg-type]
        groups = (part.q, part.k, part.v), (part.out,), (mlp.gate, mlp.up), (mlp.down,)
        packed = [packed_of(group) for group in groups]
        biases = packed[0].bias
        widths = x.shape[1], part.heads * part.head_dim, mlp.down.in_features
        normed, heads, inner = (torch.empty(2, rows, width, dtype=torch.uint8) for width in widths)
        factor = np.empty(rows, np.float32)
        compiled_int8.add_and_round_norm(x, _NO_ROWS, attention_norm, eps, normed.numpy(), factor)
        qkv = raw_product(normed, packed[0]).numpy()
        task, active, wide, y = inputs.attention(part.heads)
        compiled_int8.write_heads(
            qkv, factor, _NONE if biases is None else biases.numpy(), active, inputs.writes, inputs.cos, inputs.sin, eps,
            q_norm, k_norm, cache.keys[layer].numpy(), cache.values[layer].numpy(), wide,
        )  # fmt: skip
        task.keys, task.values = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()
        compiled_int8.attend(task, torch.get_num_threads())
        compiled_int8.round_rows(y, active, heads.numpy(), factor)
        compiled_int8.add_and_round_norm(x, raw_product(heads, packed[1]).numpy(), mlp_norm, eps, normed.numpy(), factor)
        compiled_int8.gate_and_round(raw_product(normed, packed[2]).numpy(), factor, inner.numpy())
        compiled_int8.add(x, raw_product(inner, packed[3]).numpy(), factor)


class StepShape(NamedTuple):
    """What a compiled block is like. `dtype` is `float32` or `int8`."""

    dtype: str
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int


def step_shape(block: nn.Module) -> StepShape | None:
    """The shape of a block; None where it cannot be compiled."""
    if type(block) is not Block:
        return None
    part, mlp = block.attention, block.mlp
    if type(part) is not Attention or type(mlp) is not SwiGLU:
        return None
    linears = part.q, part.k, part.v, part.out, mlp.gate, mlp.up, mlp.down
    types, norms = {type(linear) for linear in linears}, {type(linear) for linear in (part.q_norm, part.k_norm)}
    if norms not in ({RMSNorm}, {type(None)}) or any(linear.bias is not None for linear in linears[3:]):
        return None
    if len({(part.q.bias is None), (part.k.bias is None), (part.v.bias is None)}) > 1:
        return None
    if types == {Int8Linear}:
        dtype = "int8"
    elif types == {nn.Linear} and sum(linear.weight.numel() for linear in linears) <= SMALL:
        dtype = "float32"
    else:
        return None
    return StepShape(dtype, part.q.in_features, part.heads, part.kv_heads, part.head_dim, mlp.down.in_features)
