"""The attention function that every part of the model calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False, grouped: bool = False
) -> Tensor:
    """`F.scaled_dot_product_attention` with `attn_mask`, `is_causal` and `enable_gqa`.

    When bf16 is trained on a CPU, attention is computed in fp32 and rounded afterwards: the backward pass of torch's bf16
    kernel takes four times as long on short clips, and 1.6 times on 256 time steps (torch 2.14).
    """
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or not needs_grad:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    with torch.autocast("cpu", enabled=False):
        query, key, value = query.float(), key.float(), value.float()
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.to(torch.bfloat16)
