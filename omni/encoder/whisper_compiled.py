"""A small Whisper encoder on a CPU, compiled where it measured faster (`omni.cpu.compiled`, `omni.cpu.kernels`): one call for
all clips. Something that acts beside a part (an adapter, an edit, a hook) keeps it as it is.

N clips, M mel bands, F feature frames, T encoder frames, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from whisper.model import Linear, MultiHeadAttention

from omni.cpu import compiled
from omni.cpu.kernels import SMALL, StepShape

Array = np.ndarray[Any, Any]


_KINDS = {Linear, nn.LayerNorm, nn.GELU, nn.Sequential, MultiHeadAttention}


def encoder_shape(whisper: nn.Module, heads: int) -> StepShape | None:
    """What the encoder's blocks are called in measurements; None where they cannot be compiled."""
    blocks: Any = whisper.blocks
    if not len(blocks) or not all({type(part) for part in block.modules()} - {type(block)} <= _KINDS for block in blocks):
        return None
    attn, mlp = blocks[0].attn, blocks[0].mlp
    width, inner = attn.query.in_features, mlp[0].out_features
    if mlp[1].approximate != "none" or 4 * width * width + 2 * width * inner > SMALL:
        return None
    return StepShape("float32", width, heads, heads, width // heads, inner)


def can_be_read(whisper: nn.Module) -> bool:
    """Whether all its weights are parameters in float32 on a CPU."""
    weights = [p for part in whisper.modules() for p in part._parameters.values() if p is not None]
    return all(type(p) is nn.Parameter and p.dtype == torch.float32 and p.device.type == "cpu" for p in weights)


def encode(whisper: Any, mels: Tensor, lengths: Sequence[int], frames: Sequence[int]) -> Tensor:
    """What `WhisperEncoder.forward` gives, [sum(frames), D], of features [N, M, F max] float32."""
    starts = np.cumsum([0, *((length + 1) // 2 for length in lengths)])
    x = np.empty((starts[-1], whisper.conv1.out_channels), np.float32)
    stem = [part for conv in (whisper.conv1, whisper.conv2) for part in (_flat(conv.weight), _array(conv.bias))]
    held = [[p if p.is_contiguous() else p.detach().contiguous() for p in _parameters(block)] for block in whisper.blocks]
    block = whisper.blocks[0]
    places = np.array([[p.data_ptr() for p in own] for own in held])  # which stay until the call has ended
    given = *stem, _array(whisper.positional_embedding), block.heads, np.float32(block.attn_ln.eps)
    compiled.encoder(_array(mels), np.array(lengths), starts, *given, places, block.mlp[0].out_features, x)  # type: ignore[call-arg]
    out: Tensor = whisper.ln_post(torch.from_numpy(x))
    sizes = np.diff(starts).tolist()
    if list(frames) == sizes:
        return out
    return torch.cat([own[:wanted] for own, wanted in zip(out.split(sizes), frames, strict=True)])


def _parameters(block: Any) -> list[Tensor]:
    """In the order of `compiled.encoder`; read each time, since they may be others by then."""
    attn, mlp = block.attn, block.mlp
    parts = block.attn_ln, attn.query, attn.key, attn.value, attn.out, block.mlp_ln, mlp[0], mlp[2]
    return [p for part in parts for p in (part.weight, part.bias) if p is not None]


def _flat(weight: Tensor) -> Array:
    """A convolution's weight [D, M, 3] as [D, 3 M]."""
    return np.ascontiguousarray(weight.numpy(force=True).transpose(0, 2, 1)).reshape(len(weight), -1)


def _array(x: Tensor) -> Array:
    return np.ascontiguousarray(x.numpy(force=True))
