"""Computes activations again in the backward pass instead of keeping them (activation checkpointing, Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from omni.utils.private import schema_of

Recompute = bool | Literal["selective"]
"""The part of a block that is computed again: nothing, all, or all but its products and attention."""

PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"))
ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention_forward", "torch_attn::_varlen_attn")
"""Starts of the names of operators whose results `selective` keeps, beside `PRODUCTS`."""


def run_block(block: nn.Module, recompute: Recompute, *args: Any) -> Tensor:
    """The output of a block whose `forward` takes `selective` last.

    A selective one recomputes from within, so that torch.compile sees what is kept; a whole one around what is compiled.
    """
    again, selective = bool(recompute) and torch.is_grad_enabled(), recompute == "selective"
    if again and not selective:
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=draws(block))  # type: ignore[no-any-return]
    out: Tensor = block(*args, again)
    return out


def selectively(block: nn.Module, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """The output of `forward`, of which only products and attention are kept for the backward pass."""
    draw, contexts = torch.compiler.is_compiling() or draws(block), partial(create_selective_checkpoint_contexts, _policy)
    out: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draw, context_fn=contexts)
    return out


def draws(block: nn.Module) -> bool:
    """Whether a block draws random numbers, so that its random state has to be kept: an adapter's dropout does."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.modules())


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = schema_of(operator)
    kept = schema is not None and (schema.name in PRODUCTS or schema.name.startswith(ATTENTION))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
